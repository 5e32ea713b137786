"""The published tables of vitkern and its peers: those of every class of machines."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tables import stamp
from vitkern.bench.cases import CLASSES, NAMES
from vitkern.bench.tables import NOTES, comparison, details, operators

UNMEASURED = "Not measured yet: run `make bench-cpu`."


def heading(class_name: str, rows: list[dict]) -> str:
    return f"**{CLASSES[class_name][0]}**: {stamp(rows)}; {_versions(rows)}."


def _versions(rows: list[dict]) -> str:
    found = {
        row["provider"]: f"{NAMES[row['provider']]} {row['version']}"
        for row in rows
        if row.get("version") and row["provider"] in ("onnxruntime", "openvino")
    }
    return ", ".join(found.values()) or "no other library"


def summary(measured: Mapping[str, list[dict]]) -> str:
    """For README: the comparison of every class that was measured, and how to read it."""
    if not measured:
        return UNMEASURED
    found = []
    for name, rows in measured.items():
        found += [heading(name, rows), "", *comparison(rows), ""]
    return "\n".join([*found, NOTES, unmeasured(measured)]).strip()


def unmeasured(measured: Mapping[str, list[dict]]) -> str:
    """Which classes nobody has timed yet."""
    names = [
        words if flags else "CPUs without any of these"
        for name, (words, flags) in CLASSES.items()
        if name not in measured
    ]
    return f"Not measured with these peers yet: {'; '.join(names)}." if names else ""


def text(measured: Mapping[str, list[dict]]) -> str:
    """For docs/performance.md: all of it."""
    if not measured:
        return UNMEASURED
    found = []
    for name, rows in measured.items():
        found += [f"### {CLASSES[name][0]}", "", heading(name, rows), "", *comparison(rows), ""]
        found += ["All contestants:", "", *details(rows), ""]
        found += ["Steps of vitkern's forward:", "", operators(rows), ""]
    return "\n".join([*found, unmeasured(measured)]).strip()
