"""Print what a shell needs to complete vitkern's commands and options.

Needs argcomplete (pip install "vitkern[completion]"), in the Python that runs vitkern. Options,
choices and file names are completed; model names after --model.

Examples:
    vitkern completion bash >> ~/.bash_completion
    vitkern completion zsh > ~/.zfunc/_vitkern     # a folder of $fpath, before compinit
    vitkern completion fish > ~/.config/fish/completions/vitkern.fish
"""

from __future__ import annotations

import argparse
from types import ModuleType

SHELLS = ("bash", "zsh", "fish")
MODELS = ("--model", "--models")  # options that take names of models, alone or with commas


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which shell asks")


def run(given: argparse.Namespace) -> int:
    script = _argcomplete().shellcode(["vitkern"], shell=given.shell)
    print(script.strip())
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Tell the shell what may follow what was typed, and end the process."""
    argcomplete = _argcomplete()
    files = argcomplete.completers.FilesCompleter()

    def values(prefix: str, action: argparse.Action, **rest: object) -> list[str]:
        if set(MODELS) & set(action.option_strings) or action.metavar in ("MODEL", "NAME"):
            return model_names(prefix)
        return files(prefix=prefix, action=action, **rest)

    argcomplete.autocomplete(parser, default_completer=values)


def model_names(prefix: str) -> list[str]:
    """Variants such as B/16, and timm's names, after what stands before the last comma."""
    from ..names import timm_names, usual

    before, comma, last = prefix.rpartition(",")
    names = dict.fromkeys([*usual(), *timm_names()])
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def _argcomplete() -> ModuleType:
    try:
        import argcomplete
    except ImportError as error:
        raise ImportError(
            "completion needs argcomplete: pip install 'vitkern[completion]'"
        ) from error
    return argcomplete
