"""What may come of a case: it ran, it was refused in words, or it is a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

OK, REFUSED = "ok", "refused"
FAULTS = {
    "crash": "the process died by a signal",
    "hang": "no answer within the time limit",
    "wrong": "a result that the reference does not give",
    "raw": "an exception that says nothing to a user, or a traceback of a command",
    "damage": "files changed or deleted that were not vitkern's",
}

# What a refusal may be. Everything else (AttributeError, KeyError, IndexError, AssertionError,
# RecursionError, struct.error, ...) tells that nobody thought of this input.
REFUSALS = (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError)


# How wrong a number must be, in units of the largest of the result (or of 1): far above rounding in
# a few layers, far below what a wrong weight does.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.06}


class Case(NamedTuple):
    """One call or one sequence of calls."""

    about: str  # what is done with what, for people
    run: Callable[[], str | None]  # returns OK (or None) or REFUSED, or raises


class Wrong(Exception):
    """A result that the reference does not give."""


class Damage(Exception):
    """A file that must not be touched was."""


def judge(error: BaseException) -> str:
    """The outcome that an exception is."""
    if isinstance(error, Wrong):
        return "wrong"
    if isinstance(error, Damage):
        return "damage"
    words = str(error).strip()
    if isinstance(error, OverflowError):  # Python's own does not say what was too large
        return REFUSED if "vitkern" in words else "raw"
    if type(error) is LookupError or isinstance(error, MemoryError):
        return REFUSED
    known = isinstance(error, REFUSALS) and not isinstance(error, RecursionError)
    return REFUSED if known and words else "raw"


def refused(call: Callable[[], object]) -> bool:
    """Call it; True when it was refused in words. A fault passes through."""
    try:
        call()
    except Exception as error:
        if judge(error) != REFUSED:
            raise
        return True
    return False


def check_close(
    got: Tensor, torchs: Tensor, truth: Tensor, what: str, dtype: torch.dtype | None = None
) -> None:
    """Raise Wrong unless `got` is as near to the truth as a few times torch's own result is.

    torchs: the definition in the dtypes of the call; truth: the same in float64; dtype: what was
    computed in, where it is narrower than the result's. Finite or not is
    decided where both agree: numbers between them overflow one and not the other. This finds wrong
    numbers; the sharp bounds on rounding are those of tests/ops/test_ops.py.
    """
    if got.shape != torchs.shape or got.dtype != torchs.dtype:
        raise Wrong(
            f"{what}: {tuple(got.shape)} {got.dtype}, the reference gives"
            f" {tuple(torchs.shape)} {torchs.dtype}"
        )
    if got.device != torchs.device:
        raise Wrong(f"{what}: on {got.device}, the reference's on {torchs.device}")
    if got.device.type == "meta" or not got.numel():
        return
    tolerance = max(TOLERANCE.get(kind, 0.3) for kind in (got.dtype, dtype or got.dtype))
    got, torchs, truth = (t.detach().resolve_neg().double() for t in (got, torchs, truth))
    finite = torchs.isfinite() & truth.isfinite()
    bad = finite & ~got.isfinite()
    if bad.any():
        raise Wrong(f"{what}: {got[bad][0]} where the reference has {truth[bad][0]}")
    missing = torchs.isnan() & truth.isnan() & got.isfinite()
    if missing.any():
        raise Wrong(f"{what}: {got[missing][0]} where the reference has NaN")
    if not finite.any():
        return
    got, torchs, truth = got[finite], torchs[finite], truth[finite]
    scale, torch_error = truth.abs().max().clamp_min(1), (torchs - truth).abs().max()
    miss = (got - truth).abs()
    if torch_error > scale / 16:  # nothing can be said: cancellation ate the digits
        return
    if miss.max() > 8 * torch_error + tolerance * scale:
        i = miss.argmax()
        raise Wrong(
            f"{what}: {got[i]:.6g}, the reference has {truth[i]:.6g} (torch {torchs[i]:.6g})"
        )
