"""What a Vision Transformer is made of: a frozen record. The names of the usual ones: names.py."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, NoReturn

from .names import PATCHES as PATCHES
from .names import VARIANTS as VARIANTS
from .names import fields_of, timm_names
from .names import usual as names

POOLS = ("token", "mean", "map", "none")
POSITIONS = (
    "none", "learned", "learned_2d", "sincos_1d", "sincos_2d",
    "relative", "relative_mlp", "shared_relative_mlp",
)  # fmt: skip
BLOCKS = ("pre_norm", "post_norm", "parallel", "twin")
NORMS = ("layernorm", "rmsnorm")
FINAL_NORMS = ("before_pool", "after_pool", "none")
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu")
MLPS = ("plain", "swiglu", "swiglu_split")
ROPES = ("none", "axial", "mixed", "dinov3")
HEADS = ("linear", "tanh", "token_norm", "distilled")


class Stem(NamedTuple):
    stride: int  # pixels of the image per pixel of the feature map
    channels: int | None  # of the map; None: the model's width


STEMS = {
    "none": Stem(1, None), "conv": Stem(8, None), "r": Stem(4, 64), "r50": Stem(16, 1024),
    "r26_s32": Stem(32, 2048), "r50_s32": Stem(32, 2048), "resnet26d": Stem(32, 2048),
    "resnet50d": Stem(32, 2048), "resnet50d_s16": Stem(16, 1024), "mci": Stem(8, 192),
}  # fmt: skip
RATES = ("dropout", "attention_dropout", "projection_dropout", "head_dropout", "drop_path")

# Field: smallest, largest. The largest are beyond every published model (ViT-22B is 6144 wide and
# 48 deep, its MLP 24576; face recognition has 10 million classes): what is larger is a mistake, and
# would be built for hours before memory runs out.
RANGES = {
    "image_size": (1, 1 << 16),
    "patch_size": (1, 1 << 16),
    "channels": (1, 1 << 16),
    "width": (1, 1 << 16),
    "depth": (0, 1 << 12),
    "heads": (1, 1 << 16),
    "mlp_width": (1, 1 << 20),
    "classes": (0, 1 << 24),
    "registers": (0, 1 << 16),
    "relative_width": (1, 1 << 16),
    "representation_size": (1, 1 << 16),
    "pool_heads": (1, 1 << 16),
    "pool_mlp_width": (1, 1 << 20),
}
OPTIONAL = ("representation_size", "pool_heads", "pool_mlp_width")  # None: another field's


@dataclass(frozen=True)
class ViTConfig:
    """Every choice that makes a Vision Transformer; the defaults are B/16, 224, 1000 classes."""

    image_size: int | tuple[int, int] = 224  # pixels, one integer or (rows, columns)
    patch_size: int = 16  # in pixels of what patches are cut from: the image, or a stem's map
    channels: int = 3
    # What is before the patches (stem.py). "conv": three convolutions; "r50": the paper's ResNet,
    # whose map has a sixteenth of the image's sides; others of STEMS as timm's hybrids
    stem: str = "none"
    width: int = 768  # D
    depth: int = 12  # blocks
    heads: int = 12  # H
    mlp_width: int = 3072  # F
    classes: int = 1000  # 0: no head, forward returns the pooled features

    class_token: bool = True
    registers: int = 0  # register tokens, between the class token and the patches
    # "token" (class token's row), "mean" (of the patches), "none" (every row), "map" (attention
    # pooling: a learned query attends to the patches, then an MLP; SigLIP's head)
    pool: str = "token"
    # Of "map": its heads and its MLP's width where they are not the blocks', and whether the query
    # attends to class and register tokens, too (PE)
    pool_heads: int | None = None
    pool_mlp_width: int | None = None
    pool_prefix: bool = False
    # One of POSITIONS. "relative": a table of biases per block (BEiT); "relative_mlp": an MLP of
    # the offsets' logarithms makes the biases, per block or one for all ("shared_").
    position: str = "learned"
    # With "learned" and "sincos_1d": whether class and register rows have positions too.
    position_covers_prefix: bool = True
    relative_width: int = 128  # hidden width of the MLP of "relative_mlp"

    # Rotary positions of queries and keys, beside `position` (rotary.py): "axial" (EVA-02),
    # "dinov3", "mixed" (frequencies that every block and head learns).
    rope: str = "none"
    rope_temperature: float = 10000.0
    rope_offset: float = 0.0  # of the first patch, in patches
    rope_x_first: bool = False  # the first half of the channels turns with x, the second with y
    rope_grid: tuple[int, int] | None = None  # "axial": places are scaled to those of this grid
    rope_half: bool = False  # channel e turns with e + E/2; else 2e with 2e + 1

    # "pre_norm": x + branch(norm(x)); "post_norm": x + norm(branch(x)); "parallel": attention and
    # MLP of the same norm(x), from one projection (ViT-22B); "twin": two attentions of x, then two
    # MLPs, side by side
    block: str = "pre_norm"
    norm: str = "layernorm"  # or "rmsnorm"
    qkv_bias: bool = True
    key_bias: bool = True  # False: queries and values alone have the bias (BEiT, EVA)
    separate_qkv: bool = False  # three layers instead of one
    attention_norm: bool = False  # a norm of attention's result, before its projection
    # "swiglu": silu(gate) * value, both of one layer fc1; "swiglu_split": of fc1_g and fc1_x
    mlp: str = "plain"
    mlp_norm: bool = False  # a norm of the hidden rows, before fc2
    # Initial value; None: no LayerScale. A "post_norm" block has none: its norms begin with it.
    layer_scale: float | None = None
    qk_norm: bool = False  # LayerNorm of each head's q and k
    # LayerNorm before the blocks; the patch projection then has no bias (CLIP).
    pre_norm: bool = False
    final_norm: str = "before_pool"  # or "after_pool", "none"
    norm_eps: float = 1e-6
    activation: str = "gelu"  # exact; or "gelu_tanh", "quick_gelu", "silu"

    dropout: float = 0.0  # after the positions are added
    attention_dropout: float = 0.0  # of the attention weights
    projection_dropout: float = 0.0  # after attention's projection, in the MLP and after it
    head_dropout: float = 0.0
    drop_path: float = 0.0  # rate of the last block; rises linearly from 0 at the first

    # "tanh": Linear and tanh first; "token_norm": Linear, GELU, dropout, LayerNorm over classes;
    # "distilled": a second token, with a head of its own (DeiT): their average, in training both
    head: str = "linear"
    representation_size: int | None = None  # width of the tanh layer; None: width

    # Accept any size that is a multiple of the patch; positions are interpolated.
    dynamic_image_size: bool = False
    # Image sides need not be multiples of the patch: what is left at the right and below is unread.
    crop: bool = False
    mean: tuple[float, ...] | None = None  # of the pixels in 0..1; needed for uint8 images
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(float(v) for v in value))
        if not isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", tuple(self.image_size))
        if self.rope_grid is not None:
            object.__setattr__(self, "rope_grid", tuple(self.rope_grid))
        self._check_sizes()
        self._check_choices()

    def _check_kinds(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type == "bool" and not isinstance(value, bool):
                _refuse(f"{f.name} must be True or False, not {_shown(value)}")
            numbers: Sequence[Any] = [value] if f.type in ("float", "float | None") else []
            if f.name in ("mean", "std") and value is not None:
                if not isinstance(value, (tuple, list)):
                    _refuse(f"{f.name} must have one number per channel, not {_shown(value)}")
                numbers = value
            for number in numbers:
                if number is None and f.type == "float | None":
                    continue
                if not _is_finite(number):
                    _refuse(f"{f.name} must be a finite number, not {_shown(number)}")
        if not isinstance(self.image_size, (int, tuple, list)):
            _refuse(
                f"image_size must be an integer or a pair of them, not {_shown(self.image_size)}"
            )
        pair = self.rope_grid if isinstance(self.rope_grid, (tuple, list)) else ()
        if self.rope_grid is not None and (
            len(pair) != 2 or not all(_is_integer(side) and side > 0 for side in pair)
        ):
            _refuse(f"rope_grid must be a pair of positive integers, not {_shown(self.rope_grid)}")

    def _check_sizes(self) -> None:
        size = (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size
        if len(size) != 2 or not all(_is_integer(s) and s > 0 for s in size):
            _refuse(
                "image_size must be a positive integer or a pair of them, not"
                f" {_shown(self.image_size)}"
            )
        for name, (least, most) in RANGES.items():
            value = max(size) if name == "image_size" else getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not _is_integer(value) or value < least:
                _refuse(f"{name} must be an integer of at least {least}, not {_shown(value)}")
            if value > most:
                _refuse(f"{name} must be at most {most}, not {_shown(value)}")
        if not isinstance(self.stem, str) or self.stem not in STEMS:
            _refuse(f"stem must be one of {', '.join(STEMS)}, not {_shown(self.stem)}")
        if any(s < self.patch_pixels or (s % self.patch_pixels and not self.crop) for s in size):
            stride = (
                "" if self.stem == "none" else f", times the stem's stride {STEMS[self.stem][0]}"
            )
            _refuse(
                f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}"
                f"{stride}"
            )
        if self.stem == "conv" and self.width % 32:  # its first convolution has 8 groups
            _refuse(f'stem="conv" needs a width that 32 divides, not {self.width}')
        if self.stem != "none" and self.crop:
            _refuse("crop=True has no stem: images are multiples of the patch, times its stride")
        if self.width % self.heads:
            _refuse(f"width {self.width} must be a multiple of heads {self.heads}")

    def _check_choices(self) -> None:
        choices = dict(
            pool=POOLS,
            position=POSITIONS,
            final_norm=FINAL_NORMS,
            activation=ACTIVATIONS,
            head=HEADS,
            block=BLOCKS,
            norm=NORMS,
            mlp=MLPS,
            rope=ROPES,
        )
        for name, allowed in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                _refuse(f"{name} must be one of {', '.join(allowed)}, not {_shown(value)}")
        divisor = {"sincos_1d": 2, "sincos_2d": 4}.get(self.position, 1)
        if self.width % divisor:
            _refuse(
                f"position={self.position!r} needs a width that {divisor} divides, not {self.width}"
            )
        for name in RATES:
            if not 0 <= getattr(self, name) < 1:
                _refuse(f"{name} must be at least 0 and below 1, not {getattr(self, name)!r}")
        self._check_block()
        if self.norm_eps <= 0:
            _refuse(f"norm_eps must be positive, not {self.norm_eps!r}")
        if self.pool == "token" and not self.class_token:
            _refuse('pool="token" reads the class token: set class_token=True or pool="mean"')
        if self.width % (self.pool_heads or 1):
            _refuse(f"width {self.width} must be a multiple of pool_heads {self.pool_heads}")
        if self.pool != "map" and (self.pool_heads or self.pool_mlp_width or self.pool_prefix):
            _refuse('pool_heads, pool_mlp_width and pool_prefix go with pool="map"')
        if self.head == "token_norm" and (self.pool != "token" or not self.classes):
            _refuse('head="token_norm" needs pool="token" and at least one class')
        if self.head == "distilled" and self.pool != "token":
            _refuse('head="distilled" reads two tokens: it needs pool="token"')
        if (self.mean is None) != (self.std is None):
            _refuse("mean and std go together: give both or neither")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) != self.channels:
                _refuse(f"{name} must have one number per channel ({self.channels}), not {value!r}")
        if self.std is not None and 0 in self.std:
            _refuse(f"std must not contain 0: {self.std!r}")

    def _check_block(self) -> None:
        if self.mlp != "plain" and self.activation != "silu":
            _refuse(f'mlp={self.mlp!r} needs activation="silu", not {self.activation!r}')
        if self.block in ("parallel", "twin") and "relative" in self.position:
            _refuse(f"block={self.block!r} has no relative positions")
        one = dict(key_bias=True, separate_qkv=False, attention_norm=False, mlp_norm=False)
        for name, value in one.items():
            if self.block == "parallel" and getattr(self, name) is not value:
                _refuse(f'block="parallel" has one projection and one norm: set {name}={value}')
        if self.block == "parallel" and self.mlp == "swiglu_split":
            _refuse('block="parallel" has one projection: its gated MLP is mlp="swiglu"')
        if self.rope != "none" and self.head_dim % 4:
            _refuse(
                f"rope={self.rope!r} needs heads of a width that 4 divides, not {self.head_dim}"
            )
        if self.rope_temperature <= 0:
            _refuse(f"rope_temperature must be positive, not {self.rope_temperature!r}")
        if self.rope_grid is not None and self.rope != "axial":
            _refuse(f'rope_grid is of rope="axial", not {self.rope!r}')
        if self.rope_half and self.rope == "mixed":
            _refuse('rope_half is of rope="axial" and "dinov3", not "mixed"')

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """Patches down and across the image."""
        y, x = (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size
        return y // self.patch_pixels, x // self.patch_pixels

    @property
    def pixels(self) -> tuple[int, int]:
        """Rows and columns of an image."""
        y, x = (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size
        return y, x

    @property
    def patch_pixels(self) -> int:
        """Pixels of the image along a side of a patch."""
        return self.patch_size * STEMS[self.stem].stride

    @property
    def map_channels(self) -> int:
        """Channels of what patches are cut from: the image's, or those of the stem's map."""
        return self.channels if self.stem == "none" else STEMS[self.stem].channels or self.width

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def prefix_tokens(self) -> int:
        """Class token, distillation token and registers: the rows before the patches."""
        return int(self.class_token) + int(self.head == "distilled") + self.registers

    @property
    def tokens(self) -> int:
        """S, the rows of every block."""
        return self.prefix_tokens + self.patches

    @property
    def hidden_rows(self) -> int:
        """Outputs of the MLP's first layer, or layers: F, or 2 F with a gate."""
        return self.mlp_width * (1 if self.mlp == "plain" else 2)

    @property
    def head_dim(self) -> int:
        """E = D / H."""
        return self.width // self.heads

    def drop_path_of(self, block: int) -> float:
        """Stochastic depth of a block: 0 at the first, `drop_path` at the last, linear between."""
        return self.drop_path * block / (self.depth - 1) if self.depth > 1 else 0.0

    def replace(self, **changes: Any) -> ViTConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **_known(changes))

    @classmethod
    def named(cls, name: str, **changes: Any) -> ViTConfig:
        """The configuration called `name` ("B/16", "vit_base_patch16_224"), with `changes` on top.

        >>> ViTConfig.named("B/16", image_size=384, classes=10).tokens
        577
        """
        if not isinstance(name, str):
            raise TypeError(f"ViTConfig.named: name must be a str, not {type(name).__name__}")
        fields = fields_of(name)
        if fields is None:
            known = [*dict.fromkeys([*names(), *timm_names()])]
            close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
            hint = f"known: {', '.join(known[:24])}, ..."
            if close:
                hint = f"did you mean {', '.join(close)}?"
            raise ValueError(f"ViTConfig.named: unknown variant {_shown(name)}; {hint}")
        return cls(**{**fields, **_known(changes)})


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"ViTConfig: {message}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _shown(value: object) -> str:
    """A value for an error message; Python itself prints no integer of thousands of digits."""
    try:
        return f"{value!r:.100}"
    except ValueError:
        return f"a {type(value).__name__} with an integer of thousands of digits"


def _known(changes: dict[str, Any]) -> dict[str, Any]:
    fields = [f.name for f in dataclasses.fields(ViTConfig)]
    for name in changes:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=3)
            hint = f"did you mean {', '.join(close)}?"
            if not close:
                hint = f"the fields are {', '.join(fields)}"
            raise TypeError(f"ViTConfig has no field {name!r}; {hint}")
    return changes
