"""The engine on a GPU: weights folded once, then one plan of launches per image shape.

Five launches a block: qkv with LayerNorm folded in, attention, projection + residual, fc1 with
LayerNorm folded in, fc2 + residual. Where a model has them, more: queries and keys normalised, a
gate after fc1, a norm before the projection or before fc2. Rotary positions add none: what writes
queries and keys turns them. The kernels that write the residual stream leave its rows' moments for
the next LayerNorm (gpu/moments.py). With the class token's row alone asked for, the last block
computes only that row after its keys and values.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..gpu import (
    attention,
    layernorm,
    linear_residual,
    moments,
    norm_linear,
    patch_embed,
    pixels,
    rotary,
    swiglu,
)
from ..gpu.launch import Executor, cdiv
from ..gpu.runtime import device, plan
from ..gpu.runtime.binary import current_stream
from ..precision import PRECISIONS
from ..registry import REGISTRY
from . import Unpackable
from .base import Engine, stored
from .buffers import Arena, Buffers, Sizes, Stream, larger, sizes_of
from .folded import Block, Fold, Folded, Norm, Places, Positions, Wanted, rows_of
from .lasting import lasting, refill

if TYPE_CHECKING:
    from ..model import ViT

PLANS_KEPT = 8  # shapes of images, streams; each with a CUDA graph, if that is wanted
GRAPHS = os.environ.get("VITKERN_CUDA_GRAPHS") != "0"


Key = tuple[Any, ...]  # of a plan: what it computes, the image's shape, ..., the stream


class GpuEngine(Engine):
    """A ViT's weights, folded for one precision, and the plans made for its image shapes."""

    DTYPES = (torch.float32, torch.float16, torch.bfloat16)

    @staticmethod
    def why_not(model: ViT, image: Tensor, precision: str) -> str:
        if precision not in PRECISIONS:
            return f"the GPU engine computes in {', '.join(PRECISIONS)}, not {precision}"
        if image.dtype not in (*GpuEngine.DTYPES, torch.uint8):
            kinds = "float32, float16, bfloat16 or uint8"
            return f"the GPU engine takes {kinds} images, not {image.dtype}"
        c = model.config
        if c.block != "pre_norm" or c.norm != "layernorm":
            return f"the GPU engine has no {c.block} blocks with {c.norm}"
        if image.device != model.device:
            return f"the image is on {image.device}, the model on {model.device}"
        if not REGISTRY["attention"].op.on_gpu({"E": model.config.head_dim}):
            return f"heads of {model.config.head_dim} channels are too wide for the GPU's attention"
        if not image.shape[0]:
            return "there is nothing to compute"
        return ""

    def __init__(self, model: ViT, precision: str, executor: Executor | None = None) -> None:
        _refuse_capture(model.device)
        super().__init__(model, model.device.type)
        self.precision, self.dtype = precision, PRECISIONS[precision].dtype
        self.executor = executor or device.executor(model.device)
        self._lock = threading.RLock()  # of what follows
        self._plans: OrderedDict[Key, plan.Plan] = OrderedDict()
        self._arenas: dict[int, Arena] = {}  # by stream
        self._grids: dict[tuple[int, int], Positions] = {}
        c = model.config
        self._outputs = c.classes or c.width
        # The class token's row through norm and head in one launch, else they run in PyTorch.
        norms = [n for n in (model.norm, model.fc_norm) if isinstance(n, nn.LayerNorm)]
        self._last_norm = norms[0] if norms else None
        self._whole = c.pool == "token" and c.head == "linear" and bool(norms and c.depth)
        self._fold = Fold(precision, model.dtype)
        with lasting():
            self._blocks = [self._fold.block(block) for block in model.blocks]
            self._ends = self._fold.ends(model, self._whole, self._last_norm)
            statistics = ((c.mean or (0.0,) * c.channels), (c.std or (1.0,) * c.channels))
            # Results are made like it: in the model's dtype on its device, whatever the defaults.
            self._result = torch.empty(0, dtype=model.dtype, device=model.device)
            self._pixels = tuple(
                torch.tensor(t, dtype=torch.float32, device=model.device) for t in statistics
            )
        self._finish()

    def refresh(self) -> bool:
        """Fold again into the same tensors, which plans and captured CUDA graphs read."""
        if not self.in_place():
            return False
        _refuse_capture(self.model.device)
        if self.model.device.type == "cuda":  # forwards on other streams read what is written now
            torch.cuda.synchronize(self.model.device)
        with self._lock, lasting():
            for folded, block in zip(self._blocks, self.model.blocks, strict=True):
                refill(folded, self._fold.block(block))
            refill(self._ends, self._fold.ends(self.model, self._whole, self._last_norm))
            for grid, known in self._grids.items():
                refill(known, self._positions_of(grid))
        self.note()
        self._finish()
        return True

    def _finish(self) -> None:
        if self.model.device.type == "cuda":  # another stream may use the folded weights next
            torch.cuda.current_stream(self.model.device).synchronize()

    @property
    def launches(self) -> dict[str, int]:
        """Launches of each plan there is, by what it computes."""
        with self._lock:
            return {str(key[:2]): made.count for key, made in self._plans.items()}

    @property
    def native(self) -> bool:
        """Whether all plans made so far are one C++ call each."""
        with self._lock:
            return bool(self._plans) and all(made.one_call for made in self._plans.values())

    @property
    def wants(self) -> tuple[str, ...]:
        """What this model's calls ask of plans; where it is tokens alone, PyTorch has the head."""
        return ("logits", "tokens") if self._whole else ("tokens",)

    @property
    def graphs(self) -> str:
        """Which forwards are CUDA graphs, for `explain()`."""
        if not GRAPHS or not self.model.cuda_graphs:
            return "off, by model.cuda_graphs or VITKERN_CUDA_GRAPHS=0"
        with self._lock:
            plans = list(self._plans.values())
        reasons = "; ".join(sorted({made.no_graph for made in plans} - {""}))
        if reasons:
            return f"none ({reasons})"
        made = sum(one.has_graph for one in plans)
        return f"from the second forward of a shape on; {made} so far, {PLANS_KEPT} at most"

    @property
    def activation_bytes(self) -> int:
        """Memory that plans keep for what is between their launches."""
        with self._lock:
            return sum(arena.nbytes for arena in self._arenas.values())

    def logits(self, image: Tensor) -> Tensor:
        if not self._whole:
            return self.model.after_engine(self.tokens(image))
        image = self.model.feature_map(image)
        return self._run("logits", image, self._result.new_empty(image.shape[0], self._outputs))

    def tokens(self, image: Tensor) -> Tensor:
        c, image = self.config, self.model.feature_map(image)
        patches = (image.shape[2] // c.patch_size) * (image.shape[3] // c.patch_size)
        y = self._result.new_empty(image.shape[0], c.prefix_tokens + patches, c.width)
        return self._run("tokens", image, y)

    def blocks(
        self, image: Tensor, take: Sequence[int], stop: int, norm: bool
    ) -> tuple[Tensor, list[Tensor]]:
        if not stop:
            return self.model.fused_embed(image, None), []
        want, c = Wanted(tuple(sorted(set(take))), stop, norm), self.config
        image = self.model.feature_map(image)
        down, across = self._grid_of(("", image.shape))
        shape = (image.shape[0], c.prefix_tokens + down * across, c.width)
        *kept, last = self._run(want, image, self._result.new_empty(len(want.take) + 1, *shape))
        if stop - 1 in want.take and not (norm and self._ends.norm is not None):
            kept[-1] = last  # which is where that block wrote
        return last, kept

    def _run(self, want: str | Wanted, image: Tensor, y: Tensor) -> Tensor:
        image = stored(image)
        aligned = image.data_ptr() % 16 == 0  # a promise of the binaries
        stream = current_stream(image.get_device()) if image.is_cuda else 0
        if _capturing(image.device):
            # The graph owns the buffers that are made now, and reads this engine's weights.
            self.held = True
            self._plan(want, image, y, None).run(image, y)
            return y
        key = (want, image.shape, image.stride(), image.dtype, aligned, stream)
        with self._lock:
            made = self._plans.get(key)
            if made is None:
                made = self._plans[key] = self._plan(want, image, y, stream)
                self._forget_old_plans()
            else:
                self._plans.move_to_end(key)
        made.run(image, y, graph=GRAPHS and self.model.cuda_graphs)
        return y

    def _forget_old_plans(self) -> None:
        """And what they alone used; positions stay where a CUDA graph may read them."""
        while len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        streams, grids = {key[-1] for key in self._plans}, set(map(self._grid_of, self._plans))
        self._arenas = {s: arena for s, arena in self._arenas.items() if s in streams}
        if not self.held:
            self._grids = {grid: rows for grid, rows in self._grids.items() if grid in grids}

    def _grid_of(self, key: Key) -> tuple[int, int]:
        p, shape = self.config.patch_size, key[1]
        return shape[2] // p, shape[3] // p

    def _plan(self, want: str | Wanted, image: Tensor, y: Tensor, stream: int | None) -> plan.Plan:
        """A plan on a stream's arena, which may have to grow; None: with buffers of its own."""
        tf32 = self.precision == "tf32" if self.dtype == torch.float32 else None
        with torch.no_grad():
            arena = self._arena(image, self.sizes(image), stream)
            launches = plan.record(self.executor, tf32, lambda: self.start(want, image, y, arena))
            return plan.Plan(self.executor, launches, (image, y), arena.lock)

    def _arena(self, image: Tensor, sizes: Sizes, stream: int | None) -> Arena:
        if stream is None:
            return Arena(image, sizes)
        known = self._arenas.get(stream)
        if known is not None and not known.holds(sizes):  # its plans are recorded again, larger
            for key in [key for key in self._plans if key[-1] == stream]:
                del self._plans[key]
            sizes, known = larger(known.sizes, sizes), None
            del self._arenas[stream]
        if known is None:
            known = self._arenas[stream] = Arena(image, sizes)
        return known

    def sizes(self, image: Tensor) -> Sizes:
        """What a forward of such an image needs between its launches."""
        c, B = self.config, image.shape[0]
        grid = self._grid_of(("", image.shape))
        rows = B * (c.prefix_tokens + grid[0] * grid[1])
        parts = cdiv(c.width, moments.WIDTH) * rows
        F, some = c.hidden_rows if c.depth else 0, min(c.depth, 1)
        gated = 0 if c.mlp == "plain" else some * c.mlp_width
        normalised = some * max(c.attention_norm * c.width, c.mlp_norm * c.mlp_width)
        return sizes_of(
            rows, c.width, F, parts, self.model.dtype, self.dtype, gated, normalised
        )  # fmt: skip

    def start(
        self, want: str | Wanted, image: Tensor, y: Tensor, arena: Arena | None = None
    ) -> None:
        """Starts every launch of a forward in order, on an arena's buffers or new ones."""
        c = self.config
        grid = self._grid_of((want, image.shape))
        B, S = image.shape[0], c.prefix_tokens + grid[0] * grid[1]
        buffers = Buffers(arena or Arena(image, self.sizes(image)), B, S, c.width)
        positions = self._of_grid(grid)
        stream, ends = self._embed(image, positions, buffers), self._ends
        if isinstance(want, Wanted):
            self._keep_blocks(want, stream, positions, buffers, y)
            return
        for i, block in enumerate(self._blocks):
            last = i == c.depth - 1
            queries = 1 if last and want == "logits" else S
            result = y if last and want == "tokens" and ends.norm is None else None
            stream = self._block(block, stream, positions.of(i), queries, buffers, result)
        norm = ends.norm if want == "tokens" else ends.last_norm
        if want == "logits" and ends.head is not None:
            self._folded(ends.head, stream, y, "none")
        elif norm is not None:
            layernorm.normalise(stream.x, *norm, y, c.norm_eps)

    def _keep_blocks(
        self, want: Wanted, stream: Stream, positions: Positions, buffers: Buffers, y: Tensor
    ) -> None:
        """Blocks write where their rows are wanted, and the next one reads them there."""
        norm = self._ends.norm if want.norm else None
        for i, block in enumerate(self._blocks[: want.stop]):
            at = want.take.index(i) if i in want.take else None
            last = i == want.stop - 1
            result = y[-1] if last else None if at is None or norm is not None else y[at]
            stream = self._block(block, stream, positions.of(i), buffers.S, buffers, result)
            if at is not None and norm is not None:
                layernorm.normalise(stream.x, *norm, y[at], self.config.norm_eps)

    def _of_grid(self, grid: tuple[int, int]) -> Positions:
        """Kept, because a captured CUDA graph may read it; what one computes itself is its own."""
        with self._lock, lasting():
            if grid not in self._grids and _capturing(self.model.device):
                return self._positions_of(grid)
            if grid not in self._grids:
                self._grids[grid] = self._positions_of(grid)
            return self._grids[grid]

    def _positions_of(self, grid: tuple[int, int]) -> Positions:
        prefix, position = self.model.position_rows(*grid)
        biases = [self.model.attention_bias(i, *grid) for i in range(self.config.depth)]
        tables = tuple(None if b is None else b[None] for b in biases)
        return Positions(rows_of(prefix), rows_of(position), tables, self._turns_of(grid))

    def _turns_of(self, grid: tuple[int, int]) -> tuple[Tensor | None, ...]:
        """Of each block: one table that all share, unless their angles are learned."""
        c = self.config
        own = c.depth if c.rope == "mixed" else min(c.depth, 1)
        tables = [self.model.rotation(i, grid) for i in range(own)]
        turns = tuple(None if t is None else rotary.by_pairs(t.detach()) for t in tables)
        return turns if own == c.depth else turns * c.depth

    def _embed(self, image: Tensor, positions: Positions, buffers: Buffers) -> Stream:
        c, ends = self.config, self._ends
        mean, std = self._pixels if image.dtype == torch.uint8 else (None, None)
        stream = buffers.stream(buffers.S, moments.WIDTH)
        by_pixels = pixels.order_of(image) == "pixels"
        filters = ends.pixel_filters if by_pixels else ends.filters
        patch_embed.embed(
            stream.x, image, filters, ends.filter_bias, positions.prefix, positions.position,
            mean, std, moments=stream.parts,
        )  # fmt: skip
        if ends.norm_pre is None:
            return stream
        after = buffers.stream(buffers.S, layernorm.block(c.width))
        layernorm.normalise(stream.x, *ends.norm_pre, after.x, c.norm_eps, moments=after.parts)
        return after

    def _block(
        self, block: Block, stream: Stream, places: Places, queries: int, buffers: Buffers,
        result: Tensor | None,
    ) -> Stream:  # fmt: skip
        c, (bias, turns) = self.config, places
        qkv = buffers.qkv(c.heads)
        if block.qk_norm is None:
            self._folded(block.qkv, stream, qkv, "none", turns)
        else:
            self._folded(block.qkv, stream, qkv, "none")
            layernorm.normalise_heads(qkv, *block.qk_norm, c.norm_eps, turns)
        y = buffers.heads(c.heads, queries)
        attention.attend(
            qkv, y, None, bias, c.head_dim**-0.5, 0.0, None, None, queries,
        )  # fmt: skip
        middle = buffers.stream(queries, moments.WIDTH)
        weight, shift, gamma = block.projection
        linear_residual.residual_linear(
            self._normalised(block.attention_norm, y.flatten(2), buffers), weight, shift,
            stream.x[:, :queries], gamma, middle.x, middle.parts,
        )  # fmt: skip
        hidden = buffers.hidden(block.fc1.weight.shape[0], queries)
        self._folded(block.fc1, middle, hidden, c.activation if c.mlp == "plain" else "none")
        if c.mlp != "plain":
            wide, hidden = hidden, buffers.gated(c.mlp_width, queries)
            swiglu.gated(wide, hidden)
        hidden = self._normalised(block.mlp_norm, hidden, buffers)
        after = buffers.stream(queries, moments.WIDTH, result)
        weight, shift, gamma = block.fc2
        linear_residual.residual_linear(
            hidden, weight, shift, middle.x, gamma, after.x, after.parts
        )
        return after

    def _normalised(self, norm: Norm | None, rows: Tensor, buffers: Buffers) -> Tensor:
        """Rows before a Linear that has a LayerNorm of its own there: themselves without it."""
        if norm is None:
            return rows
        y = buffers.normalised(rows)
        layernorm.normalise(rows, *norm, y, self.config.norm_eps)
        return y

    def _folded(
        self, linear: Folded, stream: Stream, y: Tensor, activation: str,
        turns: Tensor | None = None,
    ) -> None:  # fmt: skip
        norm_linear.folded_linear(
            stream.x, stream.parts, stream.width, *linear, y, activation, self.config.norm_eps,
            turns,
        )  # fmt: skip


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _refuse_capture(device: torch.device) -> None:
    if _capturing(device):
        raise Unpackable(
            "weights would be folded inside a CUDA graph: make one forward before capturing"
        )
