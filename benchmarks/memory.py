"""Memory of one forward in a fresh process: python -m benchmarks.memory S/16 8 fp32 native

The figure is the growth of the resident set: its highest point during a first forward over what it
was just before. A tiny model has run by then, so that libraries and threads are not counted.
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks import models
from vitkern import ViT, ViTConfig
from vitkern.measure.machine import let_torch_run_bf16
from vitkern.measure.memory import resident, settle
from vitkern.precision import CHOICES

TINY = ViTConfig(image_size=32, width=64, depth=1, heads=2, mlp_width=128, classes=10)


def measure(model: ViT, batch: int, precision: str, provider: str) -> dict[str, int]:
    """Bytes: the parameters, their packed copy, and the growth in a first forward (both in it)."""
    chosen = models.contestants(model, precision)[provider]
    c = model.config
    y, x = (c.patch_size * n for n in c.grid)
    image = torch.randn(batch, c.channels, y, x)
    (call,) = models.calls({provider: chosen}, image, precision).values()
    with torch.inference_mode():
        before = settle()
        call()
        growth = resident("VmHWM") - before
    packed = sum(engine.packed_bytes for engine in chosen.engines.packed())
    return {
        "weights_bytes": sum(p.numel() * p.element_size() for p in chosen.parameters()),
        "packed_bytes": packed,
        "growth_bytes": max(0, growth),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("precision", choices=CHOICES)
    parser.add_argument("provider", choices=["native", "torch"])
    given = parser.parse_args(arguments)
    let_torch_run_bf16()
    measure(ViT(TINY).eval(), 1, given.precision, given.provider)
    found = measure(ViT(given.model).eval(), given.batch, given.precision, given.provider)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
