"""Every check of a certificate: what is to be checked, and carrying it out one by one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from .. import ops  # noqa: F401  fills the table
from ..config import ViTConfig
from ..contract import SLACK, Error, Slack, Verdict, on_gpu
from ..model import ViT
from ..precision import PRECISIONS
from ..registry import REGISTRY, Axes, OpSpec
from . import models, operators
from .tf32 import Tf32

CPU_OPERATOR_PRECISIONS = ("fp32", "bf16")  # a lone operator follows its tensors' dtype
GPU_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


class Checked(NamedTuple):
    """One result, held to the contract."""

    kind: str  # "operator", "model"
    name: str  # a row of the table, or a model
    part: str  # "forward", "gradients", "logits", "training step"
    result: str  # of the operator: "y", "dx"; "" of a model
    shape: str
    precision: str
    isa: str  # or the GPU's architecture
    slack: Slack
    torchs: Error
    ours: Error
    share: float  # the larger of both errors as a share of what is allowed
    problem: str  # "": the contract is kept

    @property
    def multiples(self) -> tuple[float, float]:
        """Of PyTorch's own error: worst, rms."""
        pairs = zip(self.ours, self.torchs, strict=True)
        worst, rms = (a / b if b else float(a > 0) for a, b in pairs)
        return worst, rms


class Check(NamedTuple):
    """What is to be checked, and the call that does it: a verdict for each result."""

    kind: str
    name: str
    part: str
    shape: str
    precision: str
    isa: str
    slack: Slack
    run: Callable[[], Mapping[str, Verdict]]

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self.name, self.part, self.shape, self.precision, self.isa)))


class Device(NamedTuple):
    """Where kernels run: the CPU with its sets, or a GPU of an architecture."""

    device: torch.device
    isas: tuple[str, ...]  # the first is the one in use; of a GPU, its architecture alone

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


def shape_text(axes: Axes) -> str:
    """`B8 S197 D768`"""
    return " ".join(f"{letter}{size}" for letter, size in axes.items())


def operator_checks(
    names: Sequence[str], precisions: Sequence[str], where: Device, quick: bool
) -> Iterator[Check]:
    """Forward and gradients of rows of the table, at every shape (one, if quick) and precision."""
    offered = CPU_OPERATOR_PRECISIONS if where.is_cpu else GPU_PRECISIONS
    for spec in (REGISTRY[name] for name in names):
        for axes in operators.cases(spec, quick):
            for precision in (p for p in offered if p in precisions):
                # A single element is right or wrong by luck, and so is its gradient.
                parts = ["forward"] if axes == spec.cases[0] else ["forward", "gradients"]
                own = _with_operators(where, PRECISIONS[precision].dtype)
                for part in parts:
                    yield from _operator_check(spec, axes, precision, own, part)


def _with_operators(where: Device, dtype: torch.dtype) -> Device:
    """The sets whose operators run: some have matmuls of their own in the engine alone."""
    if not where.is_cpu:
        return where
    from .. import cpu  # the extension, which a GPU's checks do without

    return where._replace(isas=tuple(dict.fromkeys(cpu.operator_isa(n, dtype) for n in where.isas)))


def _operator_check(
    spec: OpSpec, axes: Axes, precision: str, where: Device, part: str
) -> Iterator[Check]:
    expected = functools.cache(
        functools.partial(_expected, spec, axes, precision, where.device, part)
    )
    for index, isa in enumerate(where.isas):
        run = functools.partial(
            _run_operator, spec, axes, precision, where, part, isa, not index, expected
        )
        row = ("operator", spec.name, part, shape_text(axes), precision, isa, spec.slack)
        yield Check(*row, run)


def _expected(
    spec: OpSpec, axes: Axes, precision: str, device: torch.device, part: str
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The truth and PyTorch's own: the same for all instruction sets."""
    dtype = PRECISIONS[precision].dtype
    inputs = spec.make_inputs(axes, dtype, device=str(device))
    mode = Tf32() if precision == "tf32" else contextlib.nullcontext()
    if part == "forward":
        truth = operators.reference_results(spec, inputs, torch.float64)
        with mode:
            return truth, operators.reference_results(spec, inputs, dtype)
    names = operators.differentiable(spec, inputs)
    truth = operators.gradients(spec, inputs, names, torch.float64, spec.op.reference)
    with mode:
        return truth, operators.gradients(spec, inputs, names, dtype, spec.op.reference)


def _run_operator(
    spec: OpSpec, axes: Axes, precision: str, where: Device, part: str, isa: str, chosen: bool,
    expected: Callable[[], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
) -> dict[str, Verdict]:  # fmt: skip
    row = PRECISIONS[precision]
    gpu = None if where.is_cpu else on_gpu(row, isa, spec.op.name)
    inputs = spec.make_inputs(axes, row.dtype, device=str(where.device))
    truths, torchs = expected()
    if part == "forward":
        with _matmuls(precision):
            got = (
                operators.native_results(spec, inputs, isa)
                if where.is_cpu
                else operators.operator_results(spec, inputs)
            )
        return operators.judge_results(spec, got, truths, torchs, row.dtype, gpu)
    names = operators.differentiable(spec, inputs)
    if chosen:  # as a training step has them: torch's GEMM where that is faster
        with _matmuls(precision):
            got = operators.gradients(spec, inputs, names, row.dtype, spec.torch_op())
    else:
        kept = operators.native_differentiable(spec, inputs)
        truths = [t for t, n in zip(truths, names, strict=True) if n in kept]
        torchs = [t for t, n in zip(torchs, names, strict=True) if n in kept]
        names, got = kept, operators.native_gradients(spec, inputs, kept, isa)
    return operators.judge_gradients(spec, names, got, truths, torchs, row.dtype, gpu)


@contextlib.contextmanager
def _matmuls(precision: str) -> Iterator[None]:
    """fp32 matmuls of GPUs as the precision has them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _has_tiles(isa: str) -> bool:
    from .. import cpu  # the extension

    return cpu.has_tiles(isa)


def model_precisions(where: Device) -> tuple[str, ...]:
    """Those that differ there: tf32 is fp32 on a CPU without AMX."""
    if not where.is_cpu:
        return GPU_PRECISIONS
    return ("fp32", *(["tf32"] if any(map(_has_tiles, where.isas)) else []), "bf16", "int8")


def model_checks(
    name: str, size: int | None, precisions: Sequence[str], where: Device
) -> Iterator[Check]:
    """Logits of a model at each precision and on each set, and one training step."""
    made = functools.cache(functools.partial(_model, name, size, where.device))
    shape = f"{size} px" if size else ""
    for precision in (p for p in model_precisions(where) if p in precisions):
        for index, isa in enumerate(where.isas):
            if precision == "tf32" and where.is_cpu and not _has_tiles(isa):
                continue
            run = functools.partial(_logits, made, precision, "" if not index else isa, where)
            yield Check("model", name, "logits", shape, precision, isa, SLACK, run)
        if precision in ("fp32", "bf16"):
            run = functools.partial(_step, made, precision, where)
            row = ("model", name, "training step", shape, precision, where.isas[0], SLACK)
            yield Check(*row, run)


def _model(name: str, size: int | None, device: torch.device) -> models.Logits:
    torch.manual_seed(0)
    config = ViTConfig.named(name, **({"image_size": size} if size else {}))
    model = ViT(config).eval().to(device)
    return models.Logits(model, models.images(model))


def _logits(
    made: Callable[[], models.Logits], precision: str, isa: str, where: Device
) -> dict[str, Verdict]:
    gpu = None if where.is_cpu else on_gpu(PRECISIONS[precision], where.isas[0])
    with _matmuls(precision):
        return {"": made().judge(precision, isa, gpu)}


def _step(made: Callable[[], models.Logits], precision: str, where: Device) -> dict[str, Verdict]:
    subject = made()
    gpu = None if where.is_cpu else on_gpu(PRECISIONS[precision], where.isas[0])
    with _matmuls(precision):
        return {"": models.judge_step(subject.model, subject.pixels, precision, gpu)}


def carry_out(check: Check, where: Device) -> list[Checked]:
    """A row for each result; a kernel that fails is a row with that problem."""
    dtype = models.dtype_of(check.precision)
    gpu = None
    if not where.is_cpu:
        operator = REGISTRY[check.name].op.name if check.kind == "operator" else ""
        gpu = on_gpu(PRECISIONS[check.precision], check.isa, operator)
    try:
        verdicts = check.run()
    except (RuntimeError, ValueError, TypeError) as error:  # of a launch, a compiler, a check
        nothing = Error(0.0, 0.0)
        said = str(error).strip().split("\n")[0]
        verdicts = {"": Verdict(nothing, nothing, f"{type(error).__name__}: {said}")}
    rows = []
    for result, verdict in verdicts.items():
        most = verdict.torchs.allowed(dtype, check.slack, gpu)
        pairs = zip(verdict.ours, most, strict=True)
        share = max(ours / limit for ours, limit in pairs)
        about = (check.kind, check.name, check.part, result, check.shape, check.precision)
        rows.append(
            Checked(*about, check.isa, check.slack, verdict.torchs, verdict.ours, share,
                    verdict.problem)
        )  # fmt: skip
    return rows
