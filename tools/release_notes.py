"""Print one version's section of CHANGELOG.md: the notes of its release.

    python tools/release_notes.py 0.1.0

Status 1, and a reason on stderr, where there is no such section, it is empty, or it is still
unreleased: a release without notes must not happen by itself.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## \[?(?P<version>[^\]\s]+)\]?(?: - (?P<date>.+))?$")


def notes(changelog: str, version: str) -> str:
    """The text below a version's heading, up to the next one; a ValueError says what is wrong."""
    found: list[str] | None = None
    versions = []
    for line in changelog.splitlines():
        heading = HEADING.match(line)
        if heading:
            if found is not None:
                break
            versions.append(heading["version"])
            if heading["version"] == version:
                if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading["date"] or ""):
                    raise ValueError(f"{version} has no date ({line!r}): write it as - YYYY-MM-DD")
                found = []
        elif found is not None:
            found.append(line)
    if found is None:
        raise ValueError(f"no section {version}; there are {', '.join(versions) or 'none'}")
    text = "\n".join(found).strip()
    if not text:
        raise ValueError(f"the section {version} is empty")
    return text


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), arguments[0]))
    except ValueError as error:
        print(f"CHANGELOG.md: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
