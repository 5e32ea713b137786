"""The engine on a GPU: weights folded once, then one plan of launches per image shape.

Five launches a block: qkv with LayerNorm folded in, attention, projection + residual, fc1 with
LayerNorm folded in, fc2 + residual. The kernels that write the residual stream leave its rows'
moments for the next LayerNorm (gpu/moments.py). With the class token's row alone asked for, the
last block computes only that row after its keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..gpu import attention, layernorm, linear_residual, norm_linear, patch_embed
from ..gpu.launch import Executor, cdiv
from ..gpu.runtime import device, plan
from ..precision import PRECISIONS
from ..registry import REGISTRY
from . import Unpackable
from .base import Engine, stored

if TYPE_CHECKING:
    from ..model import ViT

PLANS_KEPT = 8  # with their buffers: shapes of images, streams


class Folded(NamedTuple):
    """A Linear with the LayerNorm before it folded in (gpu/norm_linear.py)."""

    weight: Tensor  # (N, K)
    sums: Tensor | None  # (N,)
    bias: Tensor  # (N,)


class Block(NamedTuple):
    qkv: Folded
    projection: tuple[Tensor, Tensor | None, Tensor | None]  # weight, bias, LayerScale's gamma
    fc1: Folded
    fc2: tuple[Tensor, Tensor | None, Tensor | None]


class Stream(NamedTuple):
    """Rows of the residual stream, and the moments that their writer left."""

    x: Tensor  # (B, rows, D)
    parts: Tensor  # (parts, B * rows, 2)
    width: int  # columns of a part


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
        if image.device != model.device:
            return f"the image is on {image.device}, the model on {model.device}"
        if model.config.qk_norm:
            return "the GPU engine does not normalise queries and keys"
        if not REGISTRY["attention"].op.on_gpu({"E": model.config.head_dim}):
            return f"heads of {model.config.head_dim} channels are too wide for the GPU's attention"
        if not image.shape[0]:
            return "there is nothing to compute"
        return ""

    def __init__(self, model: ViT, precision: str, executor: Executor | None = None) -> None:
        if model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unpackable(
                "weights would be folded inside a CUDA graph: make one forward before capturing"
            )
        super().__init__(model, model.device.type)
        self.precision, self.dtype = precision, PRECISIONS[precision].dtype
        self.executor = executor or device.executor(model.device)
        self._plans: OrderedDict[tuple, plan.Plan] = OrderedDict()
        c = model.config
        with torch.no_grad():
            self._filters = model.patch_embed.proj.weight.detach().to(self.dtype)
            self._blocks = [self._fold_block(block) for block in model.blocks]
            # The class token's row through norm and head in one launch, else they run in PyTorch.
            norms = [n for n in (model.norm, model.fc_norm) if isinstance(n, nn.LayerNorm)]
            self._last_norm = norms[0] if norms else None
            self._whole = c.pool == "token" and c.head == "linear" and bool(norms and c.depth)
            self._head = None
            if self._whole and isinstance(model.head, nn.Linear):
                self._head = self._fold(norms[0], model.head)
            statistics = ((c.mean or (0.0,) * c.channels), (c.std or (1.0,) * c.channels))
            self._pixels = tuple(
                torch.tensor(t, dtype=torch.float32, device=model.device) for t in statistics
            )
        if model.device.type == "cuda":  # another stream may use the folded weights next
            torch.cuda.current_stream(model.device).synchronize()

    @property
    def launches(self) -> dict[str, int]:
        """Launches of each plan there is, by what it computes."""
        return {str(key[:2]): made.count for key, made in self._plans.items()}

    @property
    def native(self) -> bool:
        """Whether all plans made so far are one C++ call each."""
        return bool(self._plans) and all(made.one_call for made in self._plans.values())

    def logits(self, image: Tensor) -> Tensor:
        if not self._whole:
            return self.model.forward_head(self.tokens(image))
        y = image.new_empty(
            image.shape[0], self.config.classes or self.config.width, dtype=self.model.dtype
        )
        return self._run("logits", image, y)

    def tokens(self, image: Tensor) -> Tensor:
        c = self.config
        patches = (image.shape[2] // c.patch_size) * (image.shape[3] // c.patch_size)
        shape = (image.shape[0], c.prefix_tokens + patches, c.width)
        return self._run("tokens", image, image.new_empty(shape, dtype=self.model.dtype))

    def _run(self, want: str, image: Tensor, y: Tensor) -> Tensor:
        image = stored(image)
        aligned = image.data_ptr() % 16 == 0  # a promise of the binaries
        stream = torch.cuda.current_stream(image.device).cuda_stream if image.is_cuda else 0
        key = (want, tuple(image.shape), image.stride(), image.dtype, aligned, stream)
        if image.is_cuda and torch.cuda.is_current_stream_capturing():
            # The graph owns what is made now, and fills it only when it is replayed.
            with torch.no_grad():
                self._plan(want, image, y).run(image, y)
            return y
        made = self._plans.get(key)
        if made is None:
            with torch.no_grad():
                made = self._plans[key] = self._plan(want, image, y)
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        made.run(image, y)
        return y

    def _plan(self, want: str, image: Tensor, y: Tensor) -> plan.Plan:
        tf32 = self.precision == "tf32" if self.dtype == torch.float32 else None
        launches = plan.record(self.executor, tf32, lambda: self.start(want, image, y))
        return plan.Plan(self.executor, launches, (image, y))

    def start(self, want: str, image: Tensor, y: Tensor) -> None:
        """Starts every launch of a forward in order, between buffers that it allocates."""
        c, model = self.config, self.model
        grid = (image.shape[2] // c.patch_size, image.shape[3] // c.patch_size)
        B, S = image.shape[0], c.prefix_tokens + grid[0] * grid[1]
        buffers = Buffers(image, B, S, c.width, model.dtype, self.dtype)
        stream, normed = self._embed(image, grid, buffers), isinstance(model.norm, nn.LayerNorm)
        for i, block in enumerate(self._blocks):
            last = i == c.depth - 1
            queries = 1 if last and want == "logits" else S
            result = y if last and want == "tokens" and not normed else None
            bias = model.attention_bias(i, *grid)
            stream = self._block(block, stream, bias, queries, buffers, result)
        norm = model.norm if want == "tokens" else self._last_norm
        if want == "logits" and self._head is not None:
            self._folded(self._head, stream, y, "none")
        elif isinstance(norm, nn.LayerNorm):
            layernorm.normalise(stream.x, *_norm(norm), y, norm.eps)

    def _embed(self, image: Tensor, grid: tuple[int, int], buffers: Buffers) -> Stream:
        c, model = self.config, self.model
        prefix, position = model.position_rows(*grid)
        mean, std = self._pixels if image.dtype == torch.uint8 else (None, None)
        width = patch_embed.part_width(self._filters, image.shape[0] * grid[0] * grid[1])
        stream = buffers.stream(buffers.S, width)
        patch_embed.embed(
            stream.x, image, self._filters, model.patch_embed.proj.bias, prefix, position,
            mean, std, moments=stream.parts,
        )  # fmt: skip
        norm = model.norm_pre
        if not isinstance(norm, nn.LayerNorm):
            return stream
        after = buffers.stream(buffers.S, layernorm.block(c.width))
        layernorm.normalise(stream.x, *_norm(norm), after.x, norm.eps, moments=after.parts)
        return after

    def _block(
        self, block: Block, stream: Stream, bias: Tensor | None, queries: int, buffers: Buffers,
        result: Tensor | None,
    ) -> Stream:  # fmt: skip
        c, B = self.config, buffers.B
        qkv = buffers.qkv(c.heads)
        self._folded(block.qkv, stream, qkv, "none")
        y = buffers.heads(c.heads, queries)
        attention.attend(
            qkv, y, None, None if bias is None else bias[None], c.head_dim**-0.5, 0.0, None, None,
            queries,
        )  # fmt: skip
        width = linear_residual.part_width(block.projection[0], B * queries)
        middle = buffers.stream(queries, width)
        weight, shift, gamma = block.projection
        linear_residual.residual_linear(
            y.flatten(2), weight, shift, stream.x[:, :queries], gamma, middle.x, middle.parts
        )
        hidden = buffers.hidden(block.fc1.weight.shape[0], queries)
        self._folded(block.fc1, middle, hidden, c.activation)
        after = buffers.stream(queries, width, result)
        weight, shift, gamma = block.fc2
        linear_residual.residual_linear(
            hidden, weight, shift, middle.x, gamma, after.x, after.parts
        )
        return after

    def _folded(self, linear: Folded, stream: Stream, y: Tensor, activation: str) -> None:
        norm_linear.folded_linear(
            stream.x, stream.parts, stream.width, *linear, y, activation, self.config.norm_eps
        )

    def _fold(self, norm: nn.LayerNorm, linear: nn.Linear) -> Folded:
        own = (*_norm(norm), linear.weight.detach(), linear.bias)
        return Folded(*norm_linear.fold(*own, PRECISIONS[self.precision], self.model.dtype))

    def _fold_block(self, block: Any) -> Block:
        attn, mlp = block.attn, block.mlp
        return Block(
            self._fold(block.norm1, attn.qkv),
            self._linear(attn.proj, block.ls1),
            self._fold(block.norm2, mlp.fc1),
            self._linear(mlp.fc2, block.ls2),
        )

    def _linear(self, linear: nn.Linear, scale: nn.Module) -> tuple:
        """The parameters themselves where the dtype is theirs: a change makes the engine stale."""
        vectors = (linear.bias, getattr(scale, "gamma", None))
        weight = linear.weight.detach().to(self.dtype).contiguous()
        return (weight, *(None if t is None else t.detach() for t in vectors))


class Buffers:
    """What a forward holds besides weights: two residual streams, qkv, heads and hidden rows.

    Streams are written in turn, so a kernel never reads what it writes.
    """

    def __init__(
        self, like: Tensor, B: int, S: int, D: int, stream: torch.dtype, matmul: torch.dtype
    ) -> None:
        self.B, self.S, self.D = B, S, D
        self._new = like.new_empty
        self._matmul = matmul
        self._streams = [self._new(B * S * D, dtype=stream) for _ in range(2)]
        self._qkv = self._new(B, S, 3 * D, dtype=matmul)
        self._heads = self._new(B * S * D, dtype=matmul)
        self._hidden: Tensor | None = None
        self._parts: dict[tuple[int, int, int], Tensor] = {}
        self._turn = 0

    def stream(self, rows: int, width: int, x: Tensor | None = None) -> Stream:
        """The next stream of B * rows rows (in `x` if given), with its moments."""
        self._turn ^= 1
        if x is None:
            x = self._streams[self._turn][: self.B * rows * self.D].view(self.B, rows, self.D)
        key = (self._turn, rows, width)
        if key not in self._parts:
            shape = (cdiv(self.D, width), self.B * rows, 2)
            self._parts[key] = self._new(shape, dtype=torch.float32)
        return Stream(x, self._parts[key], width)

    def qkv(self, heads: int) -> Tensor:
        return self._qkv.view(self.B, self.S, 3, heads, self.D // heads)

    def heads(self, heads: int, queries: int) -> Tensor:
        flat = self._heads[: self.B * queries * self.D]
        return flat.view(self.B, queries, heads, self.D // heads)

    def hidden(self, F: int, queries: int) -> Tensor:
        if self._hidden is None:
            self._hidden = self._new(self.B * self.S * F, dtype=self._matmul)
        return self._hidden[: self.B * queries * F].view(self.B, queries, F)


def _norm(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight.detach(), norm.bias.detach()
