"""The error contract: how far a result may be from the truth.

The truth is the reference in float64. A result's error may be at most 2 times the *worst* and 1.25
times the *rms* error that PyTorch itself makes at the same dtype, plus one eps. The rms bound is
the sharp one: truncating to bf16 where PyTorch rounds doubles both errors, and a worst-case rule of
2x alone would let it pass. Tests, demo and benchmarks all call `judge`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .precision import Precision

Slack = tuple[float, float]  # allowed (worst, rms) error, as multiples of PyTorch's own
SLACK: Slack = (2.0, 1.25)
FEW = 50  # elements: too few for PyTorch's error on them to be more than luck
SMALL = 1000  # elements of a gradient: too few for PyTorch's worst error to be more than luck


WITHOUT_MATMULS = ("layernorm",)  # operators


def on_gpu(precision: Precision, arch: str, operator: str = "") -> Precision:
    """The precision with the room that it has there: an operator's, or a whole model's.

    NVIDIA's tensor cores multiply no fp32: vitkern's is three tf32 matmuls, which keep 21 to 22 of
    24 bits. That is the one reason for more room than every backend has, so there is none where it
    does not hold: on AMD's chips, which multiply fp32 itself, and where nothing is multiplied.
    """
    if arch.startswith("gfx") or operator in WITHOUT_MATMULS:
        return precision._replace(gpu_room=1.0)
    return precision


class Error(NamedTuple):
    """How far a result is from the truth, in units of rms(truth)."""

    worst: float
    rms: float

    @classmethod
    def of(cls, got: Tensor, truth: Tensor) -> Error:
        if truth.numel() == 0:
            return cls(0.0, 0.0)
        truth = truth.double()
        unit = truth.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        miss = (got.double() - truth) / unit
        return cls(miss.abs().max().item(), miss.square().mean().sqrt().item())

    def allowed(
        self, dtype: torch.dtype, slack: Slack = SLACK, gpu: Precision | None = None
    ) -> Error:
        """The largest error that keeps the contract, where this is PyTorch's at that dtype.

        `slack` times this error, plus one eps. gpu: the precision of a GPU kernel's GEMMs, which
        may have more room.
        """
        room = 1.0 if gpu is None else gpu.gpu_room
        worst, rms = slack
        return Error(
            worst * room * self.worst + torch.finfo(dtype).eps,
            rms * room * self.rms + torch.finfo(torch.float32).eps,
        )

    def within(
        self,
        torchs: Error,
        dtype: torch.dtype,
        slack: Slack = SLACK,
        gpu: Precision | None = None,
    ) -> bool:
        """At most what `torchs` allows."""
        most = torchs.allowed(dtype, slack, gpu)
        return self.worst <= most.worst and self.rms <= most.rms


class Verdict(NamedTuple):
    """What `judge` found; `problem` is "" where the contract is kept."""

    ours: Error
    torchs: Error
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem


def judge(
    got: Tensor,
    torchs: Tensor,
    truth: Tensor,
    *,
    dtype: torch.dtype,
    slack: Slack = SLACK,
    gpu: Precision | None = None,
    gradient: bool = False,
) -> Verdict:
    """Whether `got` keeps the contract: its shape, NaN and Inf where the truth has them, its error.

    torchs: PyTorch's result at the same dtype. gpu: the precision of a GPU kernel's GEMMs, which
    has its own room, and for a handful of elements one more unit in the last place.

    gradient: a sum over rows, whose largest element can be many times its rms. In a small one
    PyTorch's worst error counts as at least one unit in the last place of that element: below, it
    was lucky there. The rms error has no such minimum.
    """
    if got.shape != truth.shape:
        nothing = Error(0.0, 0.0)
        return Verdict(nothing, nothing, f"shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    finite = truth.isfinite()
    ours, theirs = Error.of(got[finite], truth[finite]), Error.of(torchs[finite], truth[finite])
    if gradient and 0 < got.numel() < SMALL and finite.all():
        largest = Error.of(torch.zeros_like(truth), truth).worst  # in units of rms(truth)
        theirs = theirs._replace(worst=max(theirs.worst, torch.finfo(dtype).eps * largest))
    for what, is_what in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        if not torch.equal(is_what(got), is_what(truth)):
            return Verdict(ours, theirs, f"{what} in other places than the truth's")
    kept = ours.within(theirs, dtype, slack, gpu)
    if gpu is not None and got.numel() < FEW:
        kept = kept or ours.worst <= 2 * theirs.worst + gpu.unit
    return Verdict(ours, theirs, "" if kept else f"{ours} against PyTorch's {theirs}")
