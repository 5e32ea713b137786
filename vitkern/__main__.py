"""`python -m vitkern COMMAND`, also installed as `vitkern`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import __version__
from .cli import COMMANDS


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="vitkern", description="Vision Transformers on fused kernels."
    )
    top.add_argument("--version", action="version", version=f"vitkern {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"vitkern.cli.{name}")
        summary = (module.__doc__ or "").split("\n")[0]
        command = commands.add_parser(
            name,
            aliases=getattr(module, "ALIASES", ()),
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that the user can mend are one line on stderr and status 2."""
    given = parser().parse_args(arguments)
    try:
        return given.run(given)
    except BrokenPipeError:  # the reader of a pipe left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"vitkern {given.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
