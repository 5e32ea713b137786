"""The recipes that come with the package: TOML files, each named and explained."""

from __future__ import annotations

import difflib
import pathlib

from .settings import Settings, read

FOLDER = pathlib.Path(__file__).with_name("recipes")


def names() -> list[str]:
    """All recipes, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def settings(name: str) -> Settings:
    """A recipe's settings."""
    known = names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        raise ValueError(f"there is no recipe {name!r:.80}; {hint}")
    return read(FOLDER / f"{name}.toml")
