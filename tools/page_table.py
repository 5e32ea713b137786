"""A table that a tool makes, between two markers of a page: written there, or compared."""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Callable


def update(page: pathlib.Path, begin: str, end: str, made: str, check: bool) -> int:
    """Writes what was made between a page's markers; with `check`: 1 if it is not there."""
    text = page.read_text()
    inside = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not inside.search(text):
        raise SystemExit(f"{page} has no {begin} ... {end}")
    new = inside.sub(lambda _: f"{begin}\n{made}{end}", text)
    print(made)
    if check:
        return int(new != text)
    page.write_text(new)
    return 0


def main(
    about: str,
    page: pathlib.Path,
    markers: tuple[str, str],
    made: Callable[[], str],
    arguments: list[str] | None,
) -> int:
    """The command of a tool that does nothing else; about: its docstring."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args(arguments).check
    return update(page, *markers, made(), check)
