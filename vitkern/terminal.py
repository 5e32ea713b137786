"""Colours for those who watch: on a terminal, and nowhere else.

NO_COLOR (any value) turns them off, FORCE_COLOR on, as other programs have it.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


class Paint:
    """Styles text for one stream; text stays as it is where nobody watches."""

    def __init__(self, on: bool) -> None:
        self.on = on

    @classmethod
    def of(cls, stream: TextIO | None = None) -> Paint:
        """For what is printed to a stream (stdout)."""
        stream = sys.stdout if stream is None else stream
        if os.environ.get("NO_COLOR"):
            return cls(False)
        if os.environ.get("FORCE_COLOR"):
            return cls(True)
        return cls(stream.isatty() and os.environ.get("TERM") != "dumb")

    def __call__(self, text: str, *styles: str) -> str:
        if not self.on or not text:
            return text
        codes = ";".join(_CODES[style] for style in styles)
        return f"\033[{codes}m{text}\033[0m"
