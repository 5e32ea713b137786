"""Counts launches and bytes of a forward and of a training step, for docs/gpu.md.

    python -m tools.gpu_traffic            # writes the tables between the page's markers
    python -m tools.gpu_traffic --check    # status 1 if the page is old

A launch moves at least each of its tensors once. Tiles that are read again by other programs are
assumed to come from L2; a matrix larger than that moves more. The same rule serves for eager
PyTorch, so that the two can be compared.

vitkern's counts are those of its recorded launches. Eager PyTorch's are counted operator by
operator while the same model's reference path runs on tensors without values: every operator that
is no view counts as one launch (some are more) that reads its inputs and writes its results once;
attention is one fused kernel (SDPA's), which is the best that eager has. The compulsory minimum
reads the image and every parameter once and writes the result (and the gradients) once.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools import page_table
from vitkern import ViT, ViTConfig
from vitkern.engines.gpu import GpuEngine
from vitkern.engines.trace import Launchers
from vitkern.gpu.launch import Launch, Recorder, executing

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- traffic tables -->", "<!-- end of traffic tables -->"
META = {"device": "meta", "dtype": torch.bfloat16}
# No work on a device: views, and allocations whose content is written by the next operator.
FREE = re.compile(
    r"(view|reshape|expand|permute|transpose|slice|select|unsqueeze|squeeze|detach|t|mT|alias|"
    r"as_strided|unbind|split|promote_types|empty\w*|new_empty\w*|_unsafe_view)$"
)


class Traffic(NamedTuple):
    """Of one launch, or of many."""

    launches: int = 0
    read: int = 0
    written: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


def touched(t: torch.Tensor) -> int:
    """Bytes of the tensor's own elements: gaps between rows and repeated rows do not count."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * t.element_size()


def of_launch(launch: Launch) -> Traffic:
    tensors = {n: t for n, t in launch.arguments.items() if isinstance(t, torch.Tensor)}
    written = sum(touched(t) for n, t in tensors.items() if n in launch.writes)
    return Traffic(1, sum(map(touched, tensors.values())) - written, written)


def of_launches(launches: Iterable[Launch]) -> Traffic:
    """All of them together."""
    total = Traffic()
    for launch in launches:
        total = total.plus(of_launch(launch))
    return total


class Eager(TorchDispatchMode):
    """Adds up what PyTorch's operators launch and move."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Traffic()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        inputs, outputs = tree_leaves((args, kwargs)), tree_leaves(results)
        tensors = {id(t) for t in inputs if isinstance(t, torch.Tensor)}
        unchanged = all(id(t) in tensors for t in outputs)  # a conversion to what it is already
        if not (unchanged or FREE.match(func._schema.name.split("::")[1])):
            self.add(inputs, outputs)
        return results

    def add(self, inputs: list, results: list) -> None:
        read, written = (
            sum({id(t): touched(t) for t in several if isinstance(t, torch.Tensor)}.values())
            for several in (inputs, results)
        )
        self.total = self.total.plus(Traffic(1, read, written))


class _Fused(torch.autograd.Function):
    """scaled_dot_product_attention as one kernel each way: q, k, v, y, dy, dq, dk, dv and lse."""

    @staticmethod
    def forward(ctx, counter, q, k, v):
        y, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.counter = counter
        ctx.save_for_backward(q, k, v, y, lse)
        counter.add([q, k, v], [y, lse])
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ctx.counter.add([dy, q, k, v, y, lse], list(grads))
        return None, *grads


class FusedAttention(TorchFunctionMode):
    def __init__(self, counter: Eager) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(self.counter, *args[:3])
        return func(*args, **(kwargs or {}))


class Counts(NamedTuple):
    ours: Traffic
    eager: Traffic
    compulsory: int


def count(config: ViTConfig, batch: int, training: bool) -> Counts:
    """A whole model's forward, or its forward and backward, in bf16."""
    model = ViT(config, **META).train(training)
    image = torch.empty(batch, config.channels, config.image_size, config.image_size, **META)
    eager = Eager()
    with torch.set_grad_enabled(training), FusedAttention(eager), eager:
        _step(model, model.reference_forward(image), training)
    recorder, others = Recorder("sm_80"), Eager()
    if training:
        with executing(recorder), others, Launchers():
            _step(model, model.fused_forward(image), training)
    else:
        engine = GpuEngine(model, "bf16", recorder)
        y = torch.empty(batch, config.classes, **META)
        with torch.no_grad(), executing(recorder):
            engine.start("logits", image, y)
    parameters = sum(map(touched, model.parameters()))
    least = touched(image) + parameters * (2 if training else 1)
    if not training:
        least += touched(y)
    return Counts(of_launches(recorder.launches).plus(others.total), eager.total, least)


def _step(model: ViT, y: torch.Tensor, training: bool) -> None:
    if training:  # gradients as they come: .grad would be the same tensors
        torch.autograd.grad(y, list(model.parameters()), torch.empty_like(y))


def block(config: ViTConfig, batch: int) -> Counts:
    """One block's share of a forward: the difference that one more block makes."""
    long, short = (count(config.replace(depth=n), batch, False) for n in (4, 3))
    differences = [Traffic(*(a - b for a, b in zip(x, y, strict=True)))
                   for x, y in zip(long[:2], short[:2], strict=True)]  # fmt: skip
    return Counts(*differences, long.compulsory - short.compulsory)


def tables() -> str:
    """Markdown."""
    config = ViTConfig.named("B/16")
    rows = []
    for batch in (1, 8, 64):
        rows.append((f"one block, batch {batch}", block(config, batch)))
        rows.append((f"forward, batch {batch}", count(config, batch, False)))
    rows += [(f"training step, batch {n}", count(config, n, True)) for n in (8, 64)]
    text = "| ViT-B/16 at 224, bf16 | launches | eager | MB moved | eager | compulsory |\n"
    text += "|---|--:|--:|--:|--:|--:|\n"
    for name, (ours, eager, least) in rows:
        sizes = " | ".join(f"{n / 1e6:,.0f}" for n in (ours.moved, eager.moved, least))
        text += f"| {name} | {ours.launches} | {eager.launches} | {sizes} |\n"
    return text


def main(arguments: list[str] | None = None) -> int:
    return page_table.main(__doc__, PAGE, (BEGIN, END), tables, arguments)


if __name__ == "__main__":
    sys.exit(main())
