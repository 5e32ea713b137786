"""`python -m vitkern COMMAND`, also installed as `vitkern`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from . import __version__
from .cli import COMMANDS

EPILOG = """\
Start here:
  vitkern doctor           this machine: instruction sets, threads, GPUs, what to mend
  vitkern demo             check a model against PyTorch, and time both
  vitkern predict cat.jpg  name what is on a photograph
  vitkern COMMAND --help   a command's options, with examples

Status 0: done. 1: done, and the answer is bad (an error too large, an image that cannot be read).
2: not done, and one line on stderr says why. 130: interrupted."""


def parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Of all commands, or of those named alone, which is faster."""
    top = argparse.ArgumentParser(
        prog="vitkern",
        description="Vision Transformers on fused kernels.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("-V", "--version", action="version", version=f"vitkern {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        module = importlib.import_module(f"vitkern.cli.{name}")
        # A docstring that ends in "Examples:" shows them last, below the options.
        about, _, examples = (module.__doc__ or "").partition("\nExamples:\n")
        command = commands.add_parser(
            name,
            aliases=getattr(module, "ALIASES", ()),
            help=about.split("\n")[0],
            description=about,
            epilog=f"examples:\n{examples.rstrip()}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that the user can mend are one line on stderr and status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow (cli/completion.py)
        from .cli.completion import answer

        answer(parser())
    given = parser(_needed(words)).parse_args(words)
    try:
        return given.run(given)
    except BrokenPipeError:  # the reader of a pipe left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"vitkern {given.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"vitkern {given.command}: {error}", file=sys.stderr)
        return 2


def _needed(words: Sequence[str]) -> Sequence[str]:
    """The commands whose modules these words need: the one that is called, for a version none."""
    if words[:1] in (["-V"], ["--version"]):
        return ()
    return words[:1] if words and words[0] in COMMANDS else COMMANDS


if __name__ == "__main__":
    raise SystemExit(main())
