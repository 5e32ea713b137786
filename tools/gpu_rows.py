"""What brings every row of the launch table into use: for the gates, beyond what the build ships.

The ahead-of-time build has the kernels that the usual models ask for. Other models are served by
the same table: heads of up to 256 channels, a bias, dropout, rows of thousands of channels. Their
kernels are compiled at first use, and nobody would see that one of them spills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from vitkern.config import ViTConfig
from vitkern.engines.gpu import GpuEngine
from vitkern.engines.trace import MIXTURES, Launchers
from vitkern.gpu.aot.label import is_promised
from vitkern.gpu.launch import Recorder, Variant, executing
from vitkern.model import ViT

HEADS = (64, 80, 96, 128, 160, 192, 256)  # channels: one for each limit in the table's rows
EXTRAS = ({}, {"position": "relative"}, {"attention_dropout": 0.1})
PRECISIONS = ("fp32", "bf16")  # one for each width of elements


class Use(NamedTuple):
    """A model of one block, and how it is run."""

    changes: dict[str, Any]  # of ViT-B/16
    batch: int
    training: bool
    precision: str

    def launch(self, recorder: Recorder) -> None:
        config = ViTConfig.named("B/16", depth=1, **self.changes)
        mixture = MIXTURES[self.precision]
        model = ViT(config, device="meta", dtype=mixture.model).train(self.training)
        image = torch.empty(self.batch, 3, *config.pixels, dtype=model.dtype, device="meta")
        if self.training:
            with executing(recorder), Launchers():  # the image's gradient as well
                model.fused_forward(image.requires_grad_()).sum().backward()
            return
        tokens = torch.empty(
            self.batch, config.tokens, config.width, dtype=model.dtype, device="meta"
        )
        with torch.no_grad(), executing(recorder):
            engine = GpuEngine(model, mixture.precision, Recorder(recorder.arch))
            engine.start("tokens", image, tokens)


def uses() -> Iterator[Use]:
    for precision in PRECISIONS:
        for channels in HEADS:
            head = {"width": 4 * channels, "heads": 4, "mlp_width": 512}
            for batch in (1, 8, 64):  # few programs, some, and many
                yield Use(head, batch, False, precision)
            for extra in EXTRAS:
                yield Use({**head, **extra}, 64, True, precision)
        yield Use({"image_size": 256}, 64, False, precision)  # one row beyond whole tiles of 128
        yield Use({"qk_norm": True}, 1, False, precision)
        yield Use({"rope": "axial"}, 8, True, precision)
        for batch in (1, 8, 64):
            yield Use({"rope": "axial"}, batch, False, precision)
        yield Use({"rope": "axial", "qk_norm": True}, 1, False, precision)
        yield Use({"dropout": 0.1, "projection_dropout": 0.1, "drop_path": 0.1}, 8, True, precision)
        long = {"width": 4096, "heads": 64, "mlp_width": 512}  # a row over eight warps
        yield Use(long, 1, True, precision)
        odd = {"width": 64, "heads": 1, "mlp_width": 60}  # no multiple of 16
        yield Use(odd, 64, True, precision)


def variants(arch: str) -> list[Variant]:
    """Kernels that put every row of an architecture to use: of each row those with wide heads."""
    found: dict[tuple, Variant] = {}
    for use in uses():
        recorder = Recorder(arch, MIXTURES[use.precision].tf32)
        use.launch(recorder)
        for one in recorder.launches:
            found[_settings(one.variant)] = one.variant  # heads grow: the last is the widest
    return list(found.values())


def _settings(variant: Variant) -> tuple:
    """What makes another row of the table, another set of tensors, or narrower accesses."""
    blocks = tuple((n, v) for n, v in variant.constants if n.startswith("B") or v is None)
    widths = tuple(kind for _, kind in variant.signature if kind[0] == "*")
    settings = variant.num_warps, variant.num_stages, is_promised(variant)
    return variant.kernel.__name__, blocks, widths, settings
