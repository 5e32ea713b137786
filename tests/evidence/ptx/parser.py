"""PTX text -> instructions: what the emulator needs of the grammar, and nothing that it does not.

One module with one `.entry`, as Triton writes it: parameters, `.reg` and `.shared` declarations,
labels, instructions, nested `{ }` scopes with registers of their own (inline assembly has them),
and `.loc` lines, so that an error can name the line of the kernel as well as that of the PTX.
"""

from __future__ import annotations

import dataclasses
import re


class PtxError(Exception):
    """What a real machine would not do as the kernel expects; says instruction and thread."""


@dataclasses.dataclass(frozen=True)
class Register:
    name: str  # unique in the program: scopes are resolved
    kind: str  # as declared: "pred", "b32"


@dataclasses.dataclass(frozen=True)
class Immediate:
    """An integer, or the bits of a float of `width` bits (0f3F800000: 32, 0d...: 64)."""

    value: int
    width: int = 0  # 0: an integer, of whatever type the instruction has


@dataclasses.dataclass(frozen=True)
class Name:
    """A label, a parameter, a shared variable or a special register."""

    name: str


@dataclasses.dataclass(frozen=True)
class Vector:
    parts: tuple


@dataclasses.dataclass(frozen=True)
class Address:
    base: object  # Register, Name or Immediate
    offset: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """`d|p`, two results, and `!p`, a predicate's opposite (second is None)."""

    first: object
    second: object


SINK = Name("_")  # a result that nobody wants


@dataclasses.dataclass(frozen=True)
class Instruction:
    op: str  # "ld"
    modifiers: tuple[str, ...]  # ("global", "v4", "b32")
    operands: tuple
    guard: Register | None
    negated: bool  # @!p
    text: str
    line: int  # of the PTX, from 1
    source: str  # "attention.py:83", or ""

    def __str__(self) -> str:
        return f"line {self.line}{f' ({self.source})' if self.source else ''}: {self.text}"


@dataclasses.dataclass
class Program:
    entry: str
    params: list[tuple[str, str]]  # (type, name): ("u64", "kernel_param_0")
    registers: dict[str, str]  # name -> kind
    shared: dict[str, tuple[int, int]]  # variable -> (bytes, alignment); 0 bytes: dynamic
    instructions: list[Instruction]
    labels: dict[str, int]  # -> index of the instruction after it
    threads: int  # .reqntid, or 0
    text: str  # of the module


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_PARAM = re.compile(r"\.param\s+\.(\w+)(?:[^,]*?)\s([\w$]+)\s*$", re.S)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w*?(\d+)\s+([\w$]+)(?:\[(\d*)\])?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.M)
_LABEL = re.compile(r"([\w$%.]+)\s*:(?!:)")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_SPACE = re.compile(r"\s+")
_STATEMENT = re.compile(r"(?:[^;{}]|\{[^{};]*\})*;")
_LINE = re.compile(r"[^\n]*")


def parse(text: str, entry: str) -> Program:
    """The kernel `entry` of a module."""
    module = text
    files = {int(n): (b or a).rsplit("/", 1)[-1] for n, a, b in _FILE.findall(text)}
    # Comments become blanks, newlines stay: offsets still count lines.
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    head = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)(.*?)\{{", text, re.S)
    if head is None:
        raise PtxError(f"no .entry {entry} in this module")
    params = []
    for declaration in filter(None, (part.strip() for part in head.group(1).split(","))):
        found = _PARAM.match(declaration)
        if found is None:
            raise PtxError(f"unknown parameter {declaration!r}")
        params.append(found.groups())
    threads = re.search(r"\.reqntid\s+(\d+)", head.group(2))
    count = int(threads.group(1)) if threads else 0
    program = Program(entry, params, {}, {}, [], {}, count, module)
    for align, bits, name, count in _SHARED.findall(text):
        size = int(bits) // 8 * int(count or 0)
        program.shared[name] = (size, int(align or 1))
    _Body(program, text, head.end(), files).read()
    return program


class _Body:
    """A cursor over the entry's text between its braces."""

    def __init__(self, program: Program, text: str, start: int, files: dict[int, str]) -> None:
        self.program, self.text, self.at, self.files = program, text, start, files
        self.line, self.counted = 1 + text.count("\n", 0, start), start
        self.source = ""
        self.scopes: list[dict[str, Register]] = [{}]
        self.ranges: list[tuple[str, str]] = []  # (prefix, kind) of "%r<100>"
        self.opened = 0

    def read(self) -> None:
        while True:
            self.at += len(_SPACE.match(self.text, self.at).group()) if self._blank() else 0
            self.line += self.text.count("\n", self.counted, self.at)
            self.counted = self.at
            c = self.text[self.at]
            if c == "{":
                self.opened += 1
                self.scopes.append({})
                self.at += 1
            elif c == "}":
                self.at += 1
                self.scopes.pop()
                if not self.scopes:
                    return
            elif c == ";":
                self.at += 1
            elif c == ".":
                self._directive()
            elif label := _LABEL.match(self.text, self.at):
                self.program.labels[label.group(1)] = len(self.program.instructions)
                self.at = label.end()
            else:
                self._instruction()

    def _blank(self) -> bool:
        return self.text[self.at].isspace()

    def _directive(self) -> None:
        if self.text.startswith(".loc", self.at):
            line = _LINE.match(self.text, self.at)
            words = line.group().replace(",", " ").split()
            self.source = f"{self.files.get(int(words[1]), '?')}:{words[2]}"
            self.at = line.end()
            return
        statement = self._statement()
        if reg := _REG.match(statement):
            kind = reg.group(1)
            for name in (n.strip() for n in reg.group(2).split(",")):
                if "<" in name:
                    self.ranges.append((name[: name.index("<")], kind))
                else:
                    scoped = name if len(self.scopes) == 1 else f"{name}@{self.opened}"
                    self.scopes[-1][name] = Register(scoped, kind)
        elif not statement.startswith((".shared", ".pragma")):
            raise PtxError(f"line {self.line}: unknown directive {statement!r}")

    def _statement(self) -> str:
        found = _STATEMENT.match(self.text, self.at)
        if found is None:
            raise PtxError(f"line {self.line}: {self.text[self.at : self.at + 60]!r} has no end")
        self.at = found.end()
        return " ".join(found.group()[:-1].split())

    def _instruction(self) -> None:
        text = statement = self._statement()
        guard, negated = None, False
        if statement.startswith("@"):
            word, statement = statement.split(None, 1)
            negated = word[1] == "!"
            guard = self._operand(word[2 if negated else 1 :])
        opcode, _, rest = statement.partition(" ")
        op, *modifiers = opcode.replace("::", ".").split(".")
        operands = tuple(self._operand(part) for part in _split(rest))
        self.program.instructions.append(
            Instruction(
                op, tuple(modifiers), operands, guard, negated, text, self.line, self.source
            )
        )

    def _operand(self, text: str) -> object:
        text = text.strip()
        if text[0] == "{":
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text[0] == "[":
            base, sign, offset = re.fullmatch(
                r"\[\s*([^\s+\]-]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", text
            ).groups()
            distance = int(offset, 0) if offset else 0
            return Address(self._operand(base), -distance if sign == "-" else distance)
        if text[0] == "!":
            return Pair(self._operand(text[1:]), None)
        if "|" in text:
            return Pair(*(self._operand(part) for part in text.split("|")))
        if text[0].isdigit() or text[0] == "-":
            return _number(text)
        return self._register(text) or Name(text)

    def _register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope:
                found = scope[name]
                break
        else:
            prefix = name.rstrip("0123456789")
            kind = next((k for p, k in self.ranges if p == prefix and prefix != name), None)
            if kind is None:
                return None
            found = self.scopes[0][name] = Register(name, kind)
        self.program.registers[found.name] = found.kind
        return found


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def _number(text: str) -> Immediate:
    prefix = text[:2].lower()
    if prefix == "0f":
        return Immediate(int(text[2:], 16), 32)
    if prefix == "0d":
        return Immediate(int(text[2:], 16), 64)
    return Immediate(int(text.rstrip("U"), 0))
