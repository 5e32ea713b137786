"""Time what a forward spends in Python before C++ computes.

    python tools/forward_overhead.py [--model B/16]

The engine's native call is replaced by nothing, so what is left is the walk that docs/design.md
lists: from `ViT.forward` to `_C.Engine.forward`. Medians in microseconds. In the last row 64 MiB
are written before each call, which empties the caches as a forward does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vitkern import ViT, dispatch


class Nothing:
    """In the place of _C.Engine."""

    def __init__(self, native: Any) -> None:
        self.classes = native.classes

    def forward(self, **fields: Any) -> None:
        pass


def median(call: Callable[[], object], calls: int, before: Callable[[], object] | None = None):
    times = []
    for _ in range(calls):
        if before is not None:
            before()
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


@torch.inference_mode()
def measure(name: str, calls: int) -> dict[str, float]:
    """Microseconds of the whole walk and of its parts, each alone in a loop."""
    with torch.inference_mode(False):
        model = ViT(name).eval()
    c = model.config
    image = torch.randn(1, c.channels, *(c.patch_size * n for n in c.grid))
    model(image)
    engine: Any = model.engines.ready("fp32")
    engine._native = Nothing(engine._native)
    other = torch.zeros(16 << 20)
    return {
        "ViT.__call__": median(lambda: model(image), calls),
        "ViT.forward": median(lambda: model.forward(image), calls),
        "  dispatch.choose": median(lambda: dispatch.choose(model, image, "logits"), calls),
        "    Engines.structure": median(model.engines.structure, calls),
        "    Engines.ready": median(lambda: model.engines.ready("fp32"), calls),
        "  CpuEngine.logits": median(lambda: engine.logits(image), calls),
        "ViT.forward, caches empty": median(
            lambda: model.forward(image), min(calls, 50), lambda: other.add_(1)
        ),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args(arguments)
    for name, microseconds in measure(given.model, given.calls).items():
        print(f"{name:<28}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
