"""Loss of vitkern and of eager PyTorch, from the same weights, images and order.

Eager PyTorch runs a second time with another number of threads, which rounds differently and
changes nothing else: how far its loss goes from the first run's is what rounding alone does.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitkern import ViT, ViTConfig
from vitkern.bench.timm_import import prepare
from vitkern.train.data import open_data

CONFIG = ViTConfig(
    image_size=8, patch_size=2, width=64, depth=4, heads=4, mlp_width=256, channels=1, classes=10
)
STEPS, BATCH, LEARNING_RATE, WARM_UP = 300, 64, 1e-3, 50


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The digits, in an order by the seed."""
    images, _ = open_data("digits", "", eval_share=0.2, seed=0)
    if images.pixels is None:
        raise ValueError("the digits are not in memory")
    pixels = torch.from_numpy(images.pixels.copy()).float().div(127.5).sub(1).unsqueeze(1)
    labels = torch.from_numpy(images.labels.copy())
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(0, len(labels), (BATCH,), generator=generator)
        yield pixels[chosen], labels[chosen]


def losses(contestant: str, threads: int) -> list[float]:
    """A loss for each step; contestant: "vitkern" or "eager"."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    model: nn.Module = ViT(CONFIG)
    if contestant == "eager":
        model = eager_model(model.state_dict())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    found = []
    torch.set_num_threads(threads)
    try:
        for step, (images, labels) in enumerate(batches()):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    finally:
        torch.set_num_threads(before)
    return found


def eager_model(weights: dict[str, Tensor]) -> nn.Module:
    """timm's model of the same shape and weights."""
    prepare()
    from timm.models.vision_transformer import VisionTransformer

    c = CONFIG
    model = VisionTransformer(
        img_size=c.image_size, patch_size=c.patch_size, in_chans=c.channels, num_classes=c.classes,
        embed_dim=c.width, depth=c.depth, num_heads=c.heads, mlp_ratio=c.mlp_width / c.width,
    )  # fmt: skip
    model.load_state_dict(weights)
    return model


def measure() -> dict[str, list[float]]:
    threads = torch.get_num_threads()
    return {
        "vitkern": losses("vitkern", threads),
        "eager": losses("eager", threads),
        "eager, other rounding": losses("eager", 1 if threads > 1 else 2),
    }


def apart(curves: dict[str, list[float]]) -> dict[str, float]:
    """The largest difference of each curve's loss from eager PyTorch's, over all steps."""
    eager = curves["eager"]
    return {
        name: max(abs(a - b) for a, b in zip(curve, eager, strict=True))
        for name, curve in curves.items()
        if name != "eager"
    }


def draw(curves: dict[str, list[float]], path: pathlib.Path) -> None:
    """Losses above, differences from eager PyTorch's below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), dpi=110)
    styles = {"vitkern": ("C0", "-"), "eager": ("C1", "--"), "eager, other rounding": ("C7", ":")}
    for name, curve in curves.items():
        colour, line = styles[name]
        above.plot(curve, color=colour, linestyle=line, label=name)
        if name != "eager":
            gaps = [abs(a - b) for a, b in zip(curve, curves["eager"], strict=True)]
            below.plot(gaps, color=colour, linestyle=line, label=name)
    above.set(ylabel="loss", yscale="log", title="Same weights, digits and order, AdamW, fp32")
    below.set(ylabel="difference from eager", xlabel="step", yscale="log")
    for axes in (above, below):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
