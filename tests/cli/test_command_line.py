"""The command line as a whole: help that teaches, exit codes, completion, start-up."""

import os
import re
import shlex
import subprocess
import sys

import pytest

import vitkern
from vitkern import __main__ as front
from vitkern.cli import COMMANDS, completion


def examples(command: str) -> list[str]:
    """The lines of a command's help that call it."""
    help_ = subcommand(command).format_help()
    lines = (line.strip() for line in help_.splitlines())
    return [line for line in lines if re.match(rf"(\w+=\w+ )?vitkern {command}( |$)", line)]


def subcommand(command: str):
    (actions,) = front.parser([command])._subparsers._group_actions
    return actions.choices[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_by_examples(command):
    found = examples(command)
    assert found, f"vitkern {command} --help shows no example: end its docstring with Examples:"
    for line in found:
        words = shlex.split(line.partition(">")[0], comments=True)
        words = words[words.index("vitkern") + 1 :]
        assert front.parser().parse_args(words).command == command, line


def test_one_command_loads_no_other():
    """What is typed decides what is imported: a command that grows does not slow the others."""
    code = "import sys; from vitkern.__main__ import main\ntry: main(['summary', '--help'])"
    code += "\nexcept SystemExit: print(sorted(m for m in sys.modules if m.startswith('vitkern')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert "vitkern.cli.summary" in loaded and "vitkern.cli.train" not in loaded


@pytest.mark.parametrize("flag", ("--version", "-V"))
def test_both_ways_to_start_are_the_same(flag):
    command = [sys.executable, "-m", "vitkern", flag]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"vitkern {vitkern.__version__}\n"


def test_help_needs_none_of_the_slow_libraries():
    code = "import sys, vitkern.__main__ as m; m.parser().format_help()"
    code += "; slow = {'torch', 'numpy', 'triton', 'matplotlib', 'PIL', 'tqdm', 'asyncio'}"
    code += "; sys.exit(str(sorted(slow & set(sys.modules))) if slow & set(sys.modules) else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"vitkern --help loads {done.stderr}"


@pytest.mark.parametrize(
    "error, status, said",
    [
        (ValueError("a bad size"), 2, "vitkern summary: a bad size"),
        (FileNotFoundError("no such file"), 2, "vitkern summary: no such file"),
        (ImportError("pip install x"), 2, "vitkern summary: pip install x"),
        (KeyboardInterrupt(), 130, "vitkern summary: interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_statuses_are_those_that_the_help_promises(error, status, said, monkeypatch, capsys):
    def fail(given):
        raise error

    monkeypatch.setattr("vitkern.cli.summary.run", fail)
    assert front.main(["summary", "B/16"]) == status
    assert capsys.readouterr().err.strip() == said
    assert f"{status}:" in front.EPILOG


# ---- completion ----


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_gets_its_script(shell, capsys):
    pytest.importorskip("argcomplete")
    assert front.main(["completion", shell]) == 0
    assert "vitkern" in capsys.readouterr().out


def test_a_script_is_valid_bash(capsys):
    pytest.importorskip("argcomplete")
    front.main(["completion", "bash"])
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def complete(line: str) -> list[str]:
    """What a shell would offer after `line`."""
    pytest.importorskip("argcomplete")
    read, write = os.pipe()
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARC_DEBUG": ""}
    # argcomplete answers through descriptor 8.
    command = f"{shlex.quote(sys.executable)} -m vitkern 8>&{write} 9>/dev/null"
    with os.fdopen(read) as answers:
        subprocess.run(
            ["bash", "-c", command], env={**os.environ, **asked, "IFS": "\013"}, pass_fds=[write]
        )
        os.close(write)
        return [word.strip() for word in answers.read().split("\013") if word.strip()]


@pytest.mark.parametrize(
    "line, offered",
    [
        ("vitkern doc", "doctor"),
        ("vitkern doctor --no", "--no-measure"),
        ("vitkern completion z", "zsh"),
        ("vitkern summary vit_ti", "vit_tiny_patch16_224"),
    ],
)
def test_words_are_completed(line, offered):
    assert offered in complete(line)


def test_completion_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert front.main(["completion", "bash"]) == 2
    assert "pip install 'vitkern[completion]'" in capsys.readouterr().err


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        front.main(["completion", "tcsh"])
    assert stop.value.code == 2 and "bash" in capsys.readouterr().err
