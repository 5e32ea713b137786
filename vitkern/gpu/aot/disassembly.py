"""Machine code as text, split into basic blocks and loops: SASS of NVIDIA, GCN assembly of AMD.

A loop is a natural one (a branch back to a block that dominates it), so the stubs that the
assembler puts behind a kernel's end, where warps wait for a barrier, are seen as what they are:
small loops of their own, and parts of the loop that they return to.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import triton

_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_SASS = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_GCN = re.compile(r"\s+([a-z][a-z0-9_]*)\b\s*([^;]*)")
_LABEL = re.compile(r"([.$\w]+):")
_TARGET = re.compile(r"`\(([^)]+)\)")
_RAW = re.compile(r"\s+/\*([0-9a-f]{4,})\*/")
_RAW_JUMP = re.compile(r"\b((?:BRA|BSSY|CALL|RET|WARPSYNC|JMP)\b[^;]*)\b0x([0-9a-f]+)(\s*;)")


class Instruction(NamedTuple):
    """One line: `@P0 LDG.E.128 R4, desc[UR6][R2.64]`."""

    predicate: str  # "P0", "!P0", "" for always
    opcode: str  # with its modifiers
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def never(self) -> bool:
        """Whether it is there only to fill a slot: `@!PT`."""
        return self.predicate == "!PT"


class Block(NamedTuple):
    """Instructions that run in order, and the blocks that may follow."""

    code: tuple[Instruction, ...]
    next: tuple[int, ...]


def sass(cubins: Sequence[bytes], arch: str) -> list[str]:
    """The listing of each cubin's code, labels and all, as nvdisasm has it of one cubin.

    One call for all: nvdisasm takes 0.7 s to start, whatever there is to disassemble, which is a
    third of what a kernel's compilation takes. It reads one file, so the codes stand in it one
    after the other, and jumps have addresses in it in the place of labels.
    """
    codes = [_code(cubin) for cubin in cubins]
    if not codes:
        return []
    model = arch.replace("sm_", "SM") + ("a" if int(arch[3:]) >= 90 else "")
    lines = _tool("nvdisasm", "-b", model, "-ndf", binary=b"".join(codes)).splitlines()
    by_address = {int(found[1], 16): line for line in lines if (found := _RAW.match(line))}
    listings, begin = [], 0
    for code in codes:
        own = range(begin, begin + len(code), _INSTRUCTION)
        listings.append(_labelled({at: by_address[at] for at in own}))
        begin += len(code)
    return listings


_INSTRUCTION = 16  # bytes


def _labelled(lines: dict[int, str]) -> str:
    """Instructions by address, with a label where one of them jumps to."""
    jumps = [found for line in lines.values() if (found := _RAW_JUMP.search(line))]
    targets = {int(found[2], 16) for found in jumps}
    text = []
    for at, line in lines.items():
        if at in targets:
            text.append(f".L_{at:x}:")
        text.append(_RAW_JUMP.sub(r"\1`(.L_\2)\3", line))
    return "\n".join(text)


def _code(cubin: bytes) -> bytes:
    """The instructions of a cubin's only kernel: its section .text.<name>."""
    if cubin[:4] != b"\x7fELF":
        raise RuntimeError("nvdisasm cannot read this binary: not an ELF file")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = []
    for i in range(count):
        name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", cubin, start + i * size)
        sections.append((name, cubin[offset : offset + length]))
    names = sections[names_at][1]
    found = [body for name, body in sections if names[name:].startswith(b".text.")]
    if len(found) != 1:
        raise RuntimeError(f"a cubin with {len(found)} functions: 1 was expected")
    return found[0]


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of a cubin's kernel."""
    said = _tool("cuobjdump", "--dump-resource-usage", binary=cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said)}


def _tool(name: str, *options: str, binary: bytes) -> str:
    """What a program of Triton's wheel says about a binary."""
    path = _TOOLS / name
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(binary)
    try:
        done = subprocess.run([path, *options, file.name], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{path} cannot run ({error}): reinstall triton") from error
    finally:
        os.unlink(file.name)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{name} cannot read this binary: {done.stderr.strip()[:300]}")
    return done.stdout


def parse_sass(text: str) -> list[Block]:
    """Blocks of an nvdisasm listing."""
    lines: list[str | Instruction] = []
    for line in text.splitlines():
        if found := _SASS.match(line):
            lines.append(Instruction(found[1] or "", found[2], found[3]))
        elif found := _LABEL.match(line):
            lines.append(found[1])
    return _blocks(lines, _sass_jump)


def _sass_jump(one: Instruction) -> tuple[str | None, bool]:
    """(the label that may follow, whether the next line may follow)."""
    if one.name in ("CALL", "RET", "BRX", "JMX"):
        return None, one.name == "CALL"
    found = _TARGET.search(one.operands)
    always = not one.predicate and one.operands.startswith("`(")  # else: `BRA.U UP0, ...`
    if one.name == "BRA":
        return found and found[1], not always
    if one.name == "EXIT":
        return None, bool(one.predicate)
    return found and found[1], True  # BSSY, WARPSYNC: where diverged threads meet again


def parse_gcn(text: str) -> list[Block]:
    """Blocks of an AMD kernel's assembly."""
    lines: list[str | Instruction] = []
    for line in text.split(".amdhsa_kernel")[0].splitlines():
        code = line.split(";")[0].rstrip()
        if found := _LABEL.match(code):
            lines.append(found[1])
        elif found := _GCN.match(code):
            lines.append(Instruction("", found[1], found[2].strip()))
    return _blocks(lines, _gcn_jump)


def _gcn_jump(one: Instruction) -> tuple[str | None, bool]:
    if one.opcode == "s_branch":
        return one.operands, False
    if one.opcode.startswith("s_cbranch"):
        return one.operands, True
    return None, one.opcode != "s_endpgm"


def _blocks(
    lines: Iterable[str | Instruction],
    jump: Callable[[Instruction], tuple[str | None, bool]],
) -> list[Block]:
    """Blocks from labels and instructions, by where each of them may jump."""
    codes: list[list[Instruction]] = [[]]
    starts: dict[str, int] = {}
    for line in lines:
        if isinstance(line, str):
            if codes[-1]:
                codes.append([])
            starts[line] = len(codes) - 1
            continue
        codes[-1].append(line)
        target, falls = jump(line)
        if target is not None or not falls:
            codes.append([])
    blocks = []
    for index, code in enumerate(codes):
        target, falls = jump(code[-1]) if code else (None, True)
        after = {starts[target]} if target in starts else set()
        if falls and index + 1 < len(codes):
            after.add(index + 1)
        blocks.append(Block(tuple(code), tuple(sorted(after))))
    return blocks


def loops(blocks: list[Block]) -> list[frozenset[int]]:
    """The natural loops, as sets of blocks; those with one header are one loop."""
    dominators = _dominators(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for after in block.next:
            before[after].append(index)
    found: dict[int, set[int]] = {}
    for index in dominators:
        for header in blocks[index].next:
            if dominators[index] >> header & 1:
                body, todo = found.setdefault(header, {header}), [index]
                while todo:
                    one = todo.pop()
                    if one not in body and one in dominators:
                        body.add(one)
                        todo += before[one]
    return [frozenset(body) for body in found.values()]


def _dominators(blocks: list[Block]) -> dict[int, int]:
    """For each block that can be reached, the blocks that every way to it passes, as bits."""
    order: list[int] = []
    seen, stack = {0}, [(0, iter(blocks[0].next))]
    while stack:  # depth first; `order` is by the time of leaving
        index, rest = stack[-1]
        after = next(rest, None)
        if after is None:
            order.append(index)
            stack.pop()
        elif after not in seen:
            seen.add(after)
            stack.append((after, iter(blocks[after].next)))
    order.reverse()
    everything = (1 << len(blocks)) - 1
    dominators = dict.fromkeys(order, everything)
    dominators[0] = 1
    before: dict[int, list[int]] = {index: [] for index in order}
    for index in order:
        for after in blocks[index].next:
            before[after].append(index)
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            ways = (dominators[one] for one in before[index])
            new = functools.reduce(int.__and__, ways, everything) | 1 << index
            changed |= new != dominators[index]
            dominators[index] = new
    return dominators
