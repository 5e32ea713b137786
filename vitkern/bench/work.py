"""How much work a forward is: flops as PyTorch and as the engine computes it, bytes, by step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model import ViT
from ..precision import ON_CPU_ENGINE, PRECISIONS


def require_engine(model: ViT, image: Tensor) -> None:
    """A time of another path would stand in the table under the engine's name."""
    with torch.inference_mode():
        what = model.explain(image)
    if not what.startswith("path: engine"):
        raise RuntimeError(
            f"the packed engine does not serve this model, so its time means nothing:\n{what}"
        )


def flops(model: ViT, batch: int, size: int) -> int:
    """Matmuls of a forward as PyTorch computes it, two flops a multiply-add."""
    return 2 * batch * model.summary(size, show=False).multiply_adds


def engine_flops(model: ViT, batch: int, size: int) -> int:
    """The same without the rows of the last block that class-token pooling does not need.

    Of that block the engine computes k and v of all rows, and for one row q, attention, projection
    and MLP. A rate that counted the rest would be flattered by 1/depth of most GEMMs.
    """
    c = model.config.replace(image_size=size)
    skipped = 0
    if c.pool == "token" and c.head == "linear":
        S, D, F = c.tokens, c.width, c.mlp_width
        skipped = (S - 1) * (2 * D * D + 2 * S * D + 2 * D * F)
    return flops(model, batch, size) - 2 * batch * skipped


def step_flops(model: ViT, batch: int, size: int) -> dict[str, int]:
    """engine_flops by the steps of `vitkern.cpu.profile`."""
    c = model.config.replace(image_size=size)
    S, D, F, P = c.tokens, c.width, c.mlp_width, c.channels * c.patch_size**2
    blocks = c.depth
    steps = dict.fromkeys(("embed", "qkv", "attention", "proj", "mlp", "head"), 0)
    steps["embed"] = c.grid[0] * c.grid[1] * P * D
    if c.pool == "token" and c.head == "linear" and blocks:  # of the last block, the class row
        blocks -= 1
        steps |= {"qkv": (2 * S + 1) * D * D, "attention": 2 * S * D}
        steps |= {"proj": D * D, "mlp": 2 * D * F}
    steps["qkv"] += blocks * S * 3 * D * D
    steps["attention"] += blocks * 2 * S * S * D
    steps["proj"] += blocks * S * D * D
    steps["mlp"] += blocks * S * 2 * D * F
    steps["head"] = D * c.classes
    return {name: 2 * batch * count for name, count in steps.items()}


def bytes_moved(model: ViT, image: Tensor, precision: str) -> int:
    """Compulsory traffic: every weight at this precision and every pixel read once."""
    weights = sum(p.numel() for p in model.parameters())
    row = {**PRECISIONS, **ON_CPU_ENGINE}[precision]
    return row.dtype.itemsize * weights + image.element_size() * image.numel()
