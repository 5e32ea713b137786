"""Options whose value is a list with commas: --arch sm_80,sm_90, --batch 1,8."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names(text: str) -> list[str]:
    """a,b -> ["a", "b"]"""
    return [part.strip() for part in text.split(",") if part.strip()]


def names_or_none(text: str) -> list[str]:
    """The same; the word none is an empty list, and an empty text an error."""
    found = names(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: give names with commas, or none")
    return [] if found == ["none"] else found


def names_of(
    known: Collection[str], what: str, or_none: bool = False
) -> Callable[[str], list[str]]:
    """For `type=`: one or more of the known names; what: the word for one, in errors."""

    def chosen(text: str) -> list[str]:
        found = names(text)
        if or_none and found == ["none"]:
            return []
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            said = f"unknown {what} {unknown[0]}" if unknown else f"no {what}"
            choice = f"choose from {','.join(known)}{', or none' * or_none}"
            raise argparse.ArgumentTypeError(f"{said}: {choice}")
        return found

    return chosen


def numbers(text: str) -> list[int]:
    """1,8,64 -> [1, 8, 64]"""
    found = names(text)
    if not found or not all(one.isdigit() and int(one) for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 1,8,64")
    return [int(one) for one in found]


def count_of(what: str) -> Callable[[str], int]:
    """For `type=`: a number from 1 on; what: of which things, in errors."""

    def counted(text: str) -> int:
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {what}")
        return int(text)

    return counted
