"""`--preload LIBRARY`, of the commands that time peers: LD_PRELOAD of them, never of vitkern."""

from __future__ import annotations

import argparse
import pathlib


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preload", type=pathlib.Path, metavar="LIBRARY",
        help="LD_PRELOAD of the peers (never of vitkern), where a virtual machine hides from them"
        " what its CPU can do",
    )  # fmt: skip


def why_not(library: pathlib.Path | None) -> str:
    """Why a library that was asked for cannot be loaded; empty if it can, or none was."""
    there = library is None or library.is_file()
    return "" if there else f"--preload {library}: no such file"
