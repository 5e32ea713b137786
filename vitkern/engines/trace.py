"""The ahead-of-time build list: every kernel that the usual ViTs ask for, recorded, not guessed.

Each model runs on meta tensors, which have shapes and no values, with the GPU launchers in the
operators' places and a recorder behind them. What is built is therefore what a launcher would ask
for: block sizes from gpu/configs.py, absent arguments, divisibility promises and all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..gpu import tiles
from ..gpu.launch import Launch, Recorder, Variant, executing
from ..model import ViT
from ..precision import PRECISIONS
from . import catalogue

if TYPE_CHECKING:
    from .gpu import GpuEngine

MODELS = catalogue.MODELS
# Tiles by rows and splits of a sum change with the batch, each at a size of its own: close enough
# together to meet every combination (tests/gpu/test_coverage.py).
BATCHES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 1024)
EVERY_TILE = 8  # the batch whose GEMMs are built with every tile that a size could get


class Mixture(NamedTuple):
    """What a model is held in, and the precision that it is multiplied in."""

    model: torch.dtype  # parameters, images and the residual stream
    precision: str

    @property
    def cast(self) -> torch.dtype | None:
        """What matrices are cast to, as under autocast; None: as they are."""
        dtype = PRECISIONS[self.precision].dtype
        return None if dtype == self.model else dtype

    @property
    def tf32(self) -> bool | None:
        """How fp32 is multiplied."""
        return self.precision == "tf32" if PRECISIONS[self.precision].dtype.itemsize == 4 else None


MIXTURES = {name: Mixture(row.dtype, name) for name, row in PRECISIONS.items()}
MIXTURES |= {f"autocast-{name}": Mixture(torch.float32, name) for name in ("fp16", "bf16")}
USUAL = tuple(MIXTURES)  # what is built unless asked for

# How images come: in the model's dtype, or as bytes by planes (B, C, Y, X) or by pixels.
IMAGES = ("floats", "planes of bytes", "pixels of bytes")


class Case(NamedTuple):
    """One forward, or a forward and a backward, whose launches are wanted."""

    name: str  # as catalogue.config knows it
    precision: str  # of MIXTURES
    batch: int
    training: bool = False
    images: str = IMAGES[0]
    depth: int = 3  # blocks that stand for all, or none: the embedding alone
    size: int | None = None  # pixels of an image's side; None: the model's own


def cases(models: Sequence[str], precisions: Sequence[str], backward: bool) -> Iterator[Case]:
    """Inference of every model and batch; training as well, unless `backward` is off."""
    for name, precision, batch in itertools.product(models, precisions, BATCHES):
        yield Case(name, precision, batch)
        for images in IMAGES[1:]:  # the blocks have them from there
            yield Case(name, precision, batch, images=images, depth=0)
        if backward:
            yield Case(name, precision, batch, training=True)


class Launchers(TorchDispatchMode):
    """Runs what an operator runs on a GPU, forward and backward, wherever its tensors are."""

    ON_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "vitkern":
            return func.redispatch(self.ON_GPU, *args)
        return func(*args, **(kwargs or {}))


def operator_launches(case: Case, recorder: Recorder) -> None:
    """The fused operators of one model, called as `ViT.forward` calls them in training."""
    if case.images != IMAGES[0]:  # bytes come to the engine
        return
    cast, model = MIXTURES[case.precision].cast, _model(case)
    image = _images(case, model)
    with torch.set_grad_enabled(case.training), executing(recorder), Launchers():
        ends = _model(case._replace(depth=0))  # the blocks are the same
        results = [model.fused_forward(image, cast), ends.fused_forward(image, cast, head=False)]
        if case.training:
            for one in results:  # logits, and forward_features
                one.backward(torch.empty_like(one))


def engine_launches(case: Case, recorder: Recorder) -> None:
    """The packed engine's plans."""
    if case.training or _why_no_engine(case):
        return
    engine = _engine(case.name, case.precision, case.depth, case.size)
    image = engine.model.feature_map(_images(case, engine.model))  # as the engine itself begins
    c, dtype = engine.model.config, engine.model.dtype
    logits = torch.empty(case.batch, c.classes or c.width, dtype=dtype, device="meta")
    tokens = torch.empty(case.batch, c.tokens, c.width, dtype=dtype, device="meta")
    with torch.no_grad(), executing(recorder):
        for want in engine.wants:
            engine.start(want, image, logits if want == "logits" else tokens)


def _why_no_engine(case: Case) -> str:
    """Why the operators alone serve a model, in which case there are no plans to record."""
    from .gpu import GpuEngine

    model = _model(case)
    return GpuEngine.why_not(model, _images(case, model), MIXTURES[case.precision].precision)


def _model(case: Case) -> ViT:
    return _meta_model(case.name, case.precision, case.training, case.depth, case.size)


@functools.cache
def _meta_model(name: str, precision: str, training: bool, depth: int, size: int | None) -> ViT:
    """The model with three blocks, which stand for all, or none.

    The first has no drop-path and reads the embedding's rows, the second reads a block's, and the
    last may compute the class token's row alone.
    """
    changes = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "drop_path": 0.1 if training else 0.0}
    if size is not None:
        changes |= {"image_size": size}
    config = catalogue.config(name, depth=depth, **changes)
    return ViT(config, device="meta", dtype=MIXTURES[precision].model).train(training)


@functools.cache
def _engine(name: str, precision: str, depth: int, size: int | None) -> GpuEngine:
    """Its own recorder is never used: launches go to the active one."""
    from .gpu import GpuEngine

    model = _meta_model(name, precision, False, depth, size)
    return GpuEngine(model, MIXTURES[precision].precision, Recorder("sm_80"))


def _images(case: Case, model: ViT) -> Tensor:
    size = model.config.pixels  # which a stem's stride and a cropped edge are part of
    dtype = model.dtype if case.images == IMAGES[0] else torch.uint8
    if case.images.startswith("pixels"):
        pixels = torch.empty(case.batch, *size, 3, dtype=dtype, device="meta")
        return pixels.permute(0, 3, 1, 2)
    return torch.empty(case.batch, 3, *size, dtype=dtype, device="meta")


# Where launches come from: each takes a case and records what it would launch.
SOURCES: list[Callable[[Case, Recorder], None]] = [operator_launches, engine_launches]


def launches(
    case: Case, arch: str, tile: int | None = None, processors: int | None = None
) -> list[Launch]:
    """All launches of a case on an architecture, in order.

    The GEMMs have tile number `tile`, or the one for a device with so many multiprocessors (those
    of the architecture's usual board, if not given).
    """
    recorder = Recorder(arch, MIXTURES[case.precision].tf32, processors, tile)
    for source in SOURCES:
        source(case, recorder)
    return recorder.launches


def variants(
    arch: str,
    precisions: Sequence[str] = USUAL,
    models: Sequence[str] = MODELS,
    backward: bool = True,
) -> list[Variant]:
    """What has to be compiled for an architecture, each once, in the order of first use."""
    found: dict[str, Variant] = {}
    for case in cases(catalogue.models(models), precisions, backward):
        for tile in range(tiles.most(arch)) if case.batch == EVERY_TILE else (None,):
            for one in launches(case, arch, tile):
                found.setdefault(one.variant.name, one.variant)
    return list(found.values())
