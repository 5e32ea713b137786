"""The engine on a CPU: packs a ViT's weights once, then one native call per forward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _C, cpu, int8, packing, positions
from ..config import ViTConfig
from .base import Engine, stored

if TYPE_CHECKING:
    from ..model import ViT

_ORDERS = {
    "pre_norm": _C.Order.pre_norm, "post_norm": _C.Order.post_norm, "parallel": _C.Order.parallel,
}  # fmt: skip
_NORMS = {"layernorm": _C.NormKind.layer, "rmsnorm": _C.NormKind.rms}
_POOLS = {"token": _C.Pool.token, "mean": _C.Pool.mean}
_HEAD = ("head.", "head_norm.", "head_dist.", "pre_logits.", "attn_pool.")
_STEM = "patch_embed.backbone."  # which runs in PyTorch
# Parameters of attention that the engine takes as one: attn.qkv.
_SEPARATE = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
_SEPARATE_WEIGHTS = tuple(f"{name}.weight" for name in _SEPARATE)
_SEPARATE_BIASES = (*(f"{name}.bias" for name in _SEPARATE), "attn.q_bias", "attn.v_bias")
_CALLS_KEPT = 64  # kinds of calls, by the image's shape and strides
# Image sizes whose positions are remembered; fewer with attention biases, which are (H, S, S).
_GRIDS_KEPT, _GRIDS_WITH_BIASES_KEPT = 64, 8


class CpuEngine(Engine):
    """A ViT's weights, packed for one precision; calls may come from several threads at once."""

    DTYPES = (torch.float32, torch.bfloat16)

    @staticmethod
    def why_not(model: ViT, image: Tensor, precision: str) -> str:
        if precision not in cpu.PRECISIONS:
            return f"the packed engine computes in {', '.join(cpu.PRECISIONS)}, not {precision}"
        if not image.is_cpu:
            return f"the packed engine runs on the CPU, the image is on {image.device}"
        c = model.config
        if c.block not in _ORDERS:
            return f"the packed engine has no {c.block} blocks"
        if precision == "int8" and (c.block != "pre_norm" or c.norm != "layernorm"):
            return f"int8 is of pre_norm blocks with layernorm, not {c.block} with {c.norm}"
        if image.dtype not in cpu.IMAGE_DTYPES:
            return f"the packed engine takes float32, bfloat16 or uint8 images, not {image.dtype}"
        return ""

    def __init__(self, model: ViT, precision: str, isa: str = "") -> None:
        super().__init__(model, "cpu")
        self.precision, self.dtype, c = precision, model.dtype, model.config
        self._native = _C.Engine(
            isa, channels=c.map_channels, patch_y=c.patch_size, patch_x=c.patch_size, width=c.width,
            heads=c.heads, mlp_width=c.mlp_width, depth=c.depth, eps=c.norm_eps,
            activation=cpu.ACTIVATIONS[c.activation], precision=cpu.PRECISIONS[precision],
            norm=_NORMS[c.norm], order=_ORDERS.get(c.block, _C.Order.pre_norm),
            gated=c.mlp != "plain", rotary_half=c.rope_half,
            rotary_heads={"none": 0, "mixed": c.heads}.get(c.rope, 1),
        )  # fmt: skip
        self._whole_head = _has_whole_head(c)
        self._grids: OrderedDict[tuple[int, int], _Grid] = OrderedDict()
        self._calls: dict[_Key, _Call] = {}
        # Results are made like it: fp32 on the CPU, whatever the defaults are.
        self._result = torch.empty(0, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            if precision == "int8":
                self._take_integers()
            elif c.block == "parallel":
                self._take_parallel()
            else:
                self._take_panels(_C.engine_layout(isa, cpu.PRECISIONS[precision]))
            self._pixels = [
                None if t is None else torch.tensor(t, dtype=torch.float32, device="cpu")
                for t in (c.mean, c.std)
            ]
        self._native.finish()
        if precision == "int8":
            self.own_bytes = self._native.packed_bytes
            _C.arena_trim()  # what rounding took, which malloc would keep

    def _take_panels(self, layout: int) -> None:
        model = self.model
        self.matrices = {
            name: _panels(model, model.get_parameter(name), layout) for name in matrix_names(model)
        }
        for name, panels in self.matrices.items():
            self._native.set_packed(name, panels)
        for name, weight in _joined_weights(model, dict(model.named_parameters())).items():
            panels = packing.unshared(weight, layout)
            self.own_bytes += panels.bytes
            self._native.set_packed(name, panels)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._set_vector(name, parameter.detach())
        self._set_joined_biases()

    def _take_parallel(self) -> None:
        """Blocks whose projection is of MLP and attention in one, by the names of others."""
        own: dict[str, Tensor | None] = {}
        for i, block in enumerate(self.model.blocks):
            b: Any = block
            at, F, bias = f"blocks.{i}.", b.hidden, b.bias()
            own |= {f"{at}mlp.fc1.weight": b.in_proj.weight[:F]}
            own |= {f"{at}attn.qkv.weight": b.in_proj.weight[F:]}
            own |= {f"{at}mlp.fc1.bias": None if bias is None else bias[:F]}
            own |= {f"{at}attn.qkv.bias": None if bias is None else bias[F:]}
            parts = {"norm1": b.in_norm, "norm2": b.in_norm, "attn.proj": b.attn_out_proj}
            parts |= {"mlp.fc2": b.mlp_out_proj, "attn.q_norm": b.q_norm, "attn.k_norm": b.k_norm}
            for name, part in parts.items():
                own |= {f"{at}{name}.{key}": value for key, value in part.named_parameters()}
            gamma = getattr(b.ls, "gamma", None)
            own |= {f"{at}ls1.gamma": gamma, f"{at}ls2.gamma": gamma}
        ends = {n: p for n, p in self.model.named_parameters() if not n.startswith("blocks.")}
        matrices = {*matrix_names(self.model), *(n for n, p in own.items() if n.startswith("b"))}
        for name, value in {**ends, **own}.items():
            if value is not None and value.ndim != 1 and name in matrices:
                self._set_matrix(name, cpu.DTYPES[value.dtype], value.detach())
            elif value is not None:
                self._set_vector(name, value.detach())

    def _take_integers(self) -> None:
        if self.model.released is not None and not self.model.released.integers:
            self.model.check_weights("the precision int8")
        names = set(matrix_names(self.model))
        separate: dict[str, Any] = {}
        for name, part in int8.parts_of(self.model):
            if name.endswith(_SEPARATE_WEIGHTS):
                separate[name] = part
            elif isinstance(part, int8.Quantised):
                self._set_matrix(name, _C.DType.i8, part.integers, cpu.address(part.scales))
            elif name in names:  # which int8 leaves in floats
                self._set_matrix(name, cpu.DTYPES[part.dtype], part)
            else:
                self._set_vector(name, part)
        for name, joined in _joined_weights(self.model, separate).items():
            self._set_matrix(name, _C.DType.i8, joined.integers, cpu.address(joined.scales))
        self._set_joined_biases()

    def _set_matrix(self, name: str, dtype: _C.DType, weight: Tensor, scales: int = 0) -> None:
        matrix = weight.flatten(1).contiguous()
        N, K = matrix.shape
        self._native.set_matrix(name, dtype, matrix.data_ptr(), N, K, scales)

    def _set_vector(self, name: str, parameter: Tensor) -> None:
        """Hand a norm, bias or gamma to C++, which refuses what it does not know."""
        separate = name.endswith(_SEPARATE_BIASES)  # _set_joined_biases has them
        elsewhere = name.startswith(_in_torch(self.config)) or _is_position(name)
        if parameter.ndim == 1 and not separate and not elsewhere:
            vector = cpu.vector(parameter)
            self._native.set_vector(name, vector.data_ptr(), vector.numel())

    def _set_joined_biases(self) -> None:
        """Biases of queries, keys and values that are not one parameter."""
        c = self.config
        if not c.qkv_bias or (c.key_bias and not c.separate_qkv):
            return
        for i, block in enumerate(self.model.blocks):
            one: Any = block
            vector = cpu.vector(one.attn.qkv_bias().detach())
            name = f"blocks.{i}.attn.qkv.bias"
            self._native.set_vector(name, vector.data_ptr(), vector.numel())

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights, beside the parameters themselves."""
        return self._native.packed_bytes

    def logits(self, image: Tensor) -> Tensor:
        if not self._whole_head:
            return self.model.after_engine(self.tokens(image))
        return self._run("logits", image)

    def tokens(self, image: Tensor) -> Tensor:
        return self._run("tokens", image)

    def _run(self, want: str, image: Tensor) -> Tensor:
        image = stored(self.model.feature_map(image))
        call = self._call_of(want, image)
        y = self._result.new_empty(*call.shape)
        self._native.forward(
            threads=cpu.threads(), image=image.data_ptr(), y=y.data_ptr(), **call.fields
        )  # fmt: skip
        return y if self.dtype is torch.float32 else y.to(self.dtype)

    def blocks(
        self, image: Tensor, take: Sequence[int], stop: int, norm: bool
    ) -> tuple[Tensor, list[Tensor]]:
        image = stored(self.model.feature_map(image))
        call = self._call_of("tokens", image)
        kept = {i: self._result.new_empty(*call.shape) for i in sorted(set(take))}
        y = self._result.new_empty(*call.shape)
        places = [cpu.address(kept.get(i)) for i in range(self.config.depth)]
        asked = {"blocks": stop, "norm": False, "kept": places, "norm_kept": norm}
        self._native.forward(
            threads=cpu.threads(), image=image.data_ptr(), y=y.data_ptr(),
            **{**call.fields, **asked},
        )  # fmt: skip
        return y.to(self.dtype), [rows.to(self.dtype) for rows in kept.values()]

    def mixed_logits(self, images: Sequence[Tensor]) -> Tensor:
        if not self._whole_head:
            return torch.cat([self.model.after_engine(rows) for rows in self.mixed_tokens(images)])
        return torch.cat(self._run_mixed("logits", images))

    def mixed_tokens(self, images: Sequence[Tensor]) -> list[Tensor]:
        return self._run_mixed("tokens", images)

    def _run_mixed(self, want: str, images: Sequence[Tensor]) -> list[Tensor]:
        """One native call for images of any sizes."""
        images = [stored(self.model.feature_map(image)) for image in images]
        calls = [self._call_of(want, image) for image in images]
        results = [self._result.new_empty(*call.shape) for call in calls]
        threads = cpu.threads()
        self._native.forward_all(
            [
                {"threads": threads, "image": image.data_ptr(), "y": y.data_ptr(), **call.fields}
                for image, y, call in zip(images, results, calls, strict=True)
            ]
        )
        return [y.to(self.dtype) for y in results]

    def _call_of(self, want: str, image: Tensor) -> _Call:
        key = (want, image.shape, image.stride(), image.dtype)
        return self._calls.get(key) or self._call(key)

    def _call(self, key: _Key) -> _Call:
        """What calls of a kind share."""
        want, (B, _, Y, X), strides, dtype = key
        c = self.config
        grid_y, grid_x = Y // c.patch_size, X // c.patch_size
        shape: tuple[int, ...] = (B, c.prefix_tokens + grid_y * grid_x, c.width)
        if want == "logits":
            shape = (B, self._native.classes or c.width)
        mean, std = self._pixels if dtype is torch.uint8 else (None, None)
        grid = self._of_grid(grid_y, grid_x)
        pool = _POOLS[c.pool] if want == "logits" else _C.Pool.tokens
        fields = {
            "dtype": cpu.IMAGE_DTYPES[dtype], "B": B, "Y": Y, "X": X, "strides": strides,
            "T": c.prefix_tokens, "mean": cpu.address(mean), "std": cpu.address(std),
            "pool": pool, "head": want == "logits", **grid.addresses,
            "blocks": c.depth, "norm": True, "kept": [], "norm_kept": False,
        }  # fmt: skip
        if len(self._calls) >= _CALLS_KEPT:
            self._calls.clear()
        made = self._calls[key] = _Call(shape, fields, grid.tensors)
        return made

    def _of_grid(self, grid_y: int, grid_x: int) -> _Grid:
        found = self._grids.get((grid_y, grid_x))
        if found is None:
            with torch.no_grad():
                prefix, position = map(_copy, self.model.position_rows(grid_y, grid_x))
                biases = [
                    self.model.attention_bias(i, grid_y, grid_x) for i in range(self.config.depth)
                ]
                biases = [cpu.vector(b) for b in biases if b is not None]
                turns = self._turns((grid_y, grid_x))
            addresses = {
                "prefix": cpu.address(prefix),
                "position": cpu.address(position),
                "biases": [cpu.address(b) for b in biases],
                "turns": [cpu.address(t) for t in turns],
            }
            tensors = (prefix, position, *biases, *turns)
            found = self._grids[grid_y, grid_x] = _Grid(tensors, addresses)
            while len(self._grids) > (_GRIDS_WITH_BIASES_KEPT if biases else _GRIDS_KEPT):
                self._grids.popitem(last=False)
                self._calls.clear()  # which keep their grids' memory
        return found

    def _turns(self, grid: tuple[int, int]) -> list[Tensor]:
        """The table of rotary positions of each block: one that all share, unless they differ."""
        if self.config.rope == "none":
            return []
        count = range(self.config.depth if self.config.rope == "mixed" else 1)
        tables = [_copy(self.model.rotation(i, grid)) for i in count]
        found = [table for table in tables if table is not None]
        return found if self.config.rope == "mixed" else found * self.config.depth


_Key = tuple[str, torch.Size, tuple[int, ...], torch.dtype]  # what is wanted of which image


class _Call(NamedTuple):
    """A kind of call: its result's shape, what C++ is told each time, and what keeps that valid."""

    shape: tuple[int, ...]
    fields: dict[str, Any]
    tensors: tuple[Tensor | None, ...]


def matrix_names(model: ViT) -> list[str]:
    """The parameters that the engine packs into panels."""
    in_torch = _in_torch(model.config)
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.ndim != 1
        and not _is_position(name)
        and not name.endswith(_SEPARATE_WEIGHTS)
        and not name.startswith(in_torch)
    ]


def _is_position(name: str) -> bool:
    """Whether `_of_grid` reads a parameter: prefix rows, positions, what biases are made of."""
    relative = name.endswith(".relative_position_bias_table") or "rel_pos." in name
    return relative or name == "rope.freqs" or name in positions.ROWS


def _joined_weights(model: ViT, state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of queries, keys and values that are three parameters, as one for each block.

    state: tensors, or quantised weights, by name.
    """
    if not model.config.separate_qkv:
        return {}
    found: dict[str, Any] = {}
    for i in range(model.config.depth):
        parts = [state[f"blocks.{i}.{name}"] for name in _SEPARATE_WEIGHTS]
        if isinstance(parts[0], int8.Quantised):
            integers = torch.cat([part.integers for part in parts])
            joined: Any = int8.Quantised(integers, torch.cat([part.scales for part in parts]))
        else:
            joined = torch.cat([part.detach() for part in parts])
        found[f"blocks.{i}.attn.qkv.weight"] = joined
    return found


def _in_torch(config: ViTConfig) -> tuple[str, ...]:
    """What the names of parameters begin with that PyTorch's part of a forward reads."""
    return (_STEM,) if _has_whole_head(config) else (_STEM, *_HEAD)


def _has_whole_head(config: ViTConfig) -> bool:
    """Whether the engine computes the head; else it runs in PyTorch."""
    return config.head == "linear" and config.pool in _POOLS


def _panels(model: ViT, parameter: nn.Parameter, layout: int) -> _C.Packed:
    """Those of a model that has nothing else, or packed now."""
    released = model.released
    if released is not None and released.holds(parameter):
        return released.panels_of(parameter, layout)
    return packing.shared(parameter, layout)


class _Grid(NamedTuple):
    """What an image size adds: prefix rows, positions and attention biases, in fp32."""

    tensors: tuple[Tensor | None, ...]  # keeps their memory
    addresses: dict[str, Any]


def _copy(t: Tensor | None) -> Tensor | None:
    """A snapshot in fp32, as the packed weights are one."""
    return None if t is None else t.to(torch.float32, copy=True).contiguous()
