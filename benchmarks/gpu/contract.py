"""Checks vitkern's results on the device before a time is taken: a fast wrong result is none.

The truth is the reference in float64 on the same device; the yardstick is the error that PyTorch
makes there at the same precision, by the rule of every backend; fp32 that is three tf32 matmuls
has its own room (vitkern/contract.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import competitors, model_peers
from benchmarks.gpu.cases import Case, Selection
from benchmarks.gpu.device import Device, computing_in, out_of_memory
from benchmarks.rows import shape_text
from vitkern import ViT, ViTConfig
from vitkern.contract import SLACK, Error, Slack, on_gpu
from vitkern.precision import PRECISIONS
from vitkern.registry import REGISTRY, OpSpec
from vitkern.verification import operators
from vitkern.verification.models import joint_error

CHECKED_IMAGES = 2
TINY = ViTConfig(image_size=32, width=64, depth=1, heads=1, mlp_width=128, classes=10)


class Verdict(NamedTuple):
    """One check: both errors, and whether ours is within the contract."""

    what: str
    precision: str
    torchs: Error | None
    ours: Error | None
    passed: bool | None  # None: could not be checked here
    why: str = ""

    def line(self) -> str:
        if self.ours is None:
            state = "skipped" if self.passed is None else "FAILED"
            return f"{self.what:<64}{self.precision:<6}{state}: {self.why}"
        state = "ok" if self.passed else "TOO LARGE"
        errors = ("PyTorch", self.torchs), ("vitkern", self.ours)
        said = "  ".join(f"{who} {error.worst:.1e}/{error.rms:.1e}" for who, error in errors)
        return f"{self.what:<64}{self.precision:<6}{said}  {state}"

    def row(self) -> dict[str, object]:
        """For the results file."""
        errors = {
            who: None if error is None else [error.worst, error.rms]
            for who, error in (("torch", self.torchs), ("native", self.ours))
        }
        kept = {"name": self.what, "precision": self.precision, "passed": self.passed}
        return {"kind": "verified", **kept, "errors": errors, "why": self.why}


def require_kernels(device: Device) -> None:
    """A time of PyTorch's own operators would stand in the table under vitkern's name."""
    model = ViT(TINY, device=device.device, dtype=torch.bfloat16).eval()
    image = torch.zeros(1, 3, 32, 32, device=device.device, dtype=torch.bfloat16)
    with torch.inference_mode():
        competitors.path_of(model, image)


class Check(NamedTuple):
    """What is checked; `run` gives (torch's error, ours) of each result."""

    what: str
    precision: str
    run: Callable[[], list[tuple[Error, Error]]]
    slack: Slack = SLACK
    operator: str = ""  # "": a whole model


def checks(cases: Iterable[Case], device: Device, selection: Selection) -> list[Check]:
    """Every row of the operator table and every model that the cases need, at their precisions."""
    cases, found = list(cases), []
    seen: set[tuple[str, str, str]] = set()
    shapes: dict[tuple[str, str], list[dict[str, int]]] = {}
    for case in cases:
        key = (case.kind, case.name, case.precision)
        if case.kind in ("op", "op_train"):
            shapes.setdefault(key[1:], []).append(dict(case.axes))
        elif key not in seen:
            seen.add(key)
            found.append(_model_check(case, device, selection))
    if shapes:  # then also the rows of the table that are not timed: dropout, offsets, ...
        for precision in dict.fromkeys(p for _, p in shapes):
            for spec in REGISTRY.values():
                timed = sorted(
                    shapes.get((spec.name, precision), []), key=lambda a: math.prod(a.values())
                )
                found += _operator_checks(spec, precision, timed, device)
    return found


def _operator_checks(
    spec: OpSpec, precision: str, timed: list[dict[str, int]], device: Device
) -> list[Check]:
    """The forward at an odd shape and the smallest and largest timed; gradients at the first."""
    shapes = [dict(spec.cases[3]), *timed[:1], *timed[1:][-1:]]
    return [
        Check(
            f"{spec.name} {shape_text(axes)}" + (" gradients" if backward else ""),
            precision,
            lambda axes=axes, backward=backward: _operator(spec, axes, precision, device, backward),
            spec.slack,
            spec.op.name,
        )
        for axes, backward in [*((axes, False) for axes in shapes), (shapes[0], True)]
    ]


def _operator(spec: OpSpec, axes: dict[str, int], precision: str, device: Device, backward: bool):
    dtype = PRECISIONS[precision].dtype
    inputs = spec.make_inputs(axes, dtype, device=device.device)
    if backward:
        names = operators.differentiable(spec, inputs)
        ours = operators.gradients(spec, inputs, names, dtype, spec.torch_op())
        torchs, truths = (
            operators.gradients(spec, inputs, names, kind, spec.op.reference)
            for kind in (dtype, torch.float64)
        )
    else:
        ours = operators.operator_results(spec, inputs)[:1]
        torchs, truths = (
            operators.reference_results(spec, inputs, kind)[:1] for kind in (dtype, torch.float64)
        )
    return [
        (Error.of(theirs, truth), Error.of(mine, truth))
        for mine, theirs, truth in zip(ours, torchs, truths, strict=True)
    ]


def _model_check(case: Case, device: Device, selection: Selection) -> Check:
    run = _gradients if case.kind == "train" else _logits
    what = f"{case.name} " + ("gradients" if case.kind == "train" else "logits")
    return Check(what, case.precision, lambda: run(case, device, selection))


def _logits(case: Case, device: Device, selection: Selection):
    base = model_peers.original(case.name, selection.image_size, device.device)
    image, _ = competitors.examples(base, CHECKED_IMAGES, selection.image_size)
    # Everybody has the weights as the precision holds them.
    model = copy.deepcopy(base).to(PRECISIONS[case.precision].dtype)
    image = image.to(model.dtype)
    with torch.inference_mode():
        ours = model(image)
        torchs = model_peers.twin(model, "reference")(image)
    exact = copy.deepcopy(model).double()
    exact.path = "reference"
    with torch.inference_mode():
        truth = exact(image.double())
    return [(Error.of(torchs, truth), Error.of(ours, truth))]


def _gradients(case: Case, device: Device, selection: Selection):
    """The error of all gradients together, each parameter's in units of its own size."""
    base = model_peers.original(case.name, selection.image_size, device.device)
    image, target = competitors.examples(base, CHECKED_IMAGES, selection.image_size)

    def run(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = copy.deepcopy(base).to(dtype).train()
        model.path = path
        competitors.Step(model, model, image.to(dtype), target, case.precision)()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    ours, torchs = run("auto", torch.float32), run("reference", torch.float32)
    truth = run("reference", torch.float64)
    return [(joint_error(torchs, truth), joint_error(ours, truth))]


def verify(check: Check, device: Device) -> Verdict:
    """One verdict; an error of ours is a failure, too little memory is none."""
    try:
        with computing_in(check.precision):
            errors = check.run()
        numerics = on_gpu(PRECISIONS[check.precision], device.arch, check.operator)
        passed = [
            mine.within(theirs, numerics.dtype, check.slack, gpu=numerics)
            for theirs, mine in errors
        ]
        # The result that fails, else the first.
        shown = errors[passed.index(False) if False in passed else 0]
        verdict = Verdict(check.what, check.precision, *shown, all(passed))
    except Exception as error:  # whatever a compiler or a launch may throw
        skipped = None if out_of_memory(error) else False
        verdict = Verdict(check.what, check.precision, None, None, skipped, device.reason(error))
    device.free()
    return verdict


def complaint(verdicts: list[Verdict]) -> str:
    """What failed, in one line; "" where nothing did."""
    failed = [f"{v.what} {v.precision}" for v in verdicts if v.passed is False]
    if not failed:
        return ""
    some = ", ".join(failed[:8]) + (" and more" if len(failed) > 8 else "")
    return f"{len(failed)} of {len(verdicts)} checks, so nothing was timed: {some}"
