"""Every command line that the documents show is accepted by the program that it calls.

Lines of code blocks, of docstrings and in `backquotes`; the real parsers judge them, and what is
cheap is run. A command by its name alone in a sentence (`vitkern aot`) need only exist.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from vitkern.__main__ import main, parser
from vitkern.cli import COMMANDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PAGES += sorted((ROOT / ".github").rglob("*.md")) + sorted((ROOT / ".github").rglob("*.yml"))
SCRIPTS = [
    path
    for folder in ("vitkern/cli", "tools", "examples", "tests/fuzz")
    for path in sorted((ROOT / folder).glob("*.py"))
]
PROGRAMS = ("vitkern", "make", "python", "pytest", "pip")
READERS_OWN = {"serve.py"}  # scripts that stand for the reader's
CHEAP = {"doctor", "info", "summary"}  # seconds at most, and nothing is written


class Line(NamedTuple):
    """A command line of a document; `whole`: as typed, not a name in a sentence."""

    page: pathlib.Path
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def words_of(text: str) -> tuple[str, ...]:
    """The words of a call of one of our programs, without its comment and variables, or ()."""
    if not re.match(r"(?:[A-Z_]+=\S* )*(?:" + "|".join(PROGRAMS) + r")(?:\s|$)", text):
        return ()
    words = shlex.split(text, comments=True)
    for sign in (">", ">>", "<", "|"):  # what follows is the shell's
        words = words[: words.index(sign)] if sign in words else words
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return tuple(words)


def typed_lines(block: str) -> list[str]:
    """What is typed: all lines, or where some begin with a prompt those; the rest is printed."""
    prompted = re.findall(r"^\$ (.*)$", block, re.M)
    return prompted or block.splitlines()


def lines_of(page: pathlib.Path) -> list[Line]:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        docstring = re.match(r'"""(.*?)"""', text, re.S)
        texts = re.findall(r"^    (\S.*)$", docstring[1] if docstring else "", re.M)
        found = [(words_of(line), True) for line in texts]
    elif page.suffix == ".yml":
        found = [(words_of(line), True) for line in re.findall(r"^ *- run: (.+)$", text, re.M)]
    else:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        shown = [block for language, block in blocks if language != "python"]
        found = [(words_of(line), True) for block in shown for line in typed_lines(block)]
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", text):
        words = words_of(span)
        found.append((words, len(words) > 2))
    return [Line(page, words, whole) for words, whole in found if len(words) > 1]


LINES = list(dict.fromkeys(line for page in PAGES + SCRIPTS for line in lines_of(page)))


def of_program(*programs: str) -> list[Line]:
    return [line for line in LINES if line.words[0] in programs]


# ---- vitkern -------------------------------------------------------------------------------------


def vitkern_lines() -> list[Line]:
    module = [
        line._replace(words=line.words[2:])
        for line in of_program("python")
        if line.words[1:3] == ("-m", "vitkern")
    ]
    return [line for line in of_program("vitkern") + module if len(line.words) > 1]


@pytest.mark.parametrize("line", vitkern_lines(), ids=str)
def test_vitkern_takes_it(line, capsys):
    if not line.whole:
        assert line.words[1] in (*COMMANDS, "--help", "--version"), line
        return
    try:
        parser().parse_args(line.words[1:])
    except SystemExit as stop:
        assert not stop.code, f"{line}: {capsys.readouterr().err}"


@pytest.mark.parametrize(
    "line", [one for one in vitkern_lines() if one.words[1] in CHEAP and one.whole], ids=str
)
def test_cheap_commands_run(line, capsys):
    """B/17 is what pages mistype: one line, status 2."""
    wrong = "B/17" in line.words
    assert main(line.words[1:]) == (2 if wrong else 0)
    said = capsys.readouterr()
    assert "did you mean B/16" in said.err if wrong else said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and f"usage: vitkern {command}" in said


# ---- make ----------------------------------------------------------------------------------------


def try_make(*words: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", *words]
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize("words", sorted({line.words[1:] for line in of_program("make")}), ids=str)
def test_make_has_the_target(words):
    done = try_make(*words)
    assert done.returncode == 0, f"make {shlex.join(words)}: {done.stderr}"


def test_a_target_that_is_not_there_is_seen():
    assert try_make("no-such-target").returncode != 0


# ---- python, pip, pytest -------------------------------------------------------------------------


def installed_by(page: pathlib.Path) -> set[str]:
    """What a page's own lines install before they call it."""
    lines = (line.words for line in of_program("python", "pip") if line.page == page)
    return {word.split("==")[0] for words in lines if "install" in words for word in words}


def command_source(path: pathlib.Path) -> str:
    """A command's source, and those of modules beside or above it that have a part of its options.

    One whose command it is with a docstring, or one that adds an option to it.
    """
    text = path.read_text(encoding="utf-8")
    shared = re.findall(r"\b(\w+)\.(?:main\(\s*__doc__|add_option\(parser)", text)
    places = [folder / f"{name}.py" for name in shared for folder in (path.parent, path.parents[1])]
    return text + "".join(one.read_text(encoding="utf-8") for one in places if one.is_file())


@pytest.mark.parametrize("line", of_program("python"), ids=str)
def test_python_finds_it(line):
    """The module or the script, and in its source the options."""
    name, rest = line.words[1], line.words[2:]
    if name == "-m":
        name, rest = line.words[2], line.words[3:]
        if name in installed_by(line.page):
            return
        spec = importlib.util.find_spec(name)
        assert spec, f"{line}: no module {name}"
        source = pathlib.Path(spec.origin)
        if source.name == "__init__.py":
            source = source.with_name("__main__.py")
    else:
        source = ROOT / name
        if name in READERS_OWN:
            return
        assert source.is_file(), f"{line}: no file {name}"
    if ROOT in source.parents and name != "vitkern":
        known = command_source(source)
        for option in (word.split("=")[0] for word in rest if word.startswith("--")):
            assert f'"{option}"' in known, f"{line}: {name} has no option {option}"


PARSE = """
import shlex, sys
from _pytest.config import _prepareconfig
for line in sys.stdin:
    _prepareconfig(shlex.split(line))._ensure_unconfigure()
_prepareconfig(["tests", "--no-such-option"])
"""


def test_pytest_takes_them():
    """With the options of the conftest.py of a line's folder; the parser's own last is refused."""
    typed = {line.words[1:] for line in of_program("pytest") if line.whole}
    typed |= {line.words[3:] for line in of_program("python") if "pytest" in line.words[2:3]}
    assert typed
    text = "\n".join(map(shlex.join, sorted(typed)))
    command = [sys.executable, "-c", PARSE]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    (refused,) = re.findall(r"unrecognized arguments: (.*)$", done.stderr, re.M)
    assert refused == "--no-such-option", done.stderr[-1000:]


@pytest.mark.parametrize("line", of_program("pip"), ids=str)
def test_pip_installs_extras_that_exist(line):
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11 and newer")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"(?:^\.|^vitkern)\[([\w,]+)\]", "\n".join(line.words), re.M)
    for extra in ",".join(named).split(",") if named else []:
        assert extra in declared["optional-dependencies"], f"{line}: no extra {extra}"


def test_lines_are_found():
    """The documents show some of every kind: an extraction that finds nothing proves nothing."""
    for program in PROGRAMS:
        assert of_program(program), program
        assert any(line.whole for line in of_program(program)), program
    assert any(line.page.suffix == ".py" for line in LINES)
    assert any(line.page.suffix == ".yml" for line in LINES)
