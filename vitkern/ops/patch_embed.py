"""patch_embed: unfold + projection + bias + position + prefix tokens, straight into (B, S, D)."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import philox
from ..registry import Axes, Operator, OpSpec, check_tensor, register
from . import _library
from ._wide import ordered, outer, rows_sum, wide


def _pixels(image: Tensor, dtype: torch.dtype, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """The image in `dtype`: uint8 scaled to [0, 1], then normalised per channel when asked."""
    x = image.to(dtype)
    if image.dtype == torch.uint8:
        x = x / 255
    if mean is not None:
        std = cast(Tensor, std)  # the two go together
        x = (x - mean.to(dtype)[:, None, None]) / std.to(dtype)[:, None, None]
    return x


def _unfold(x: Tensor, py: int, px: int) -> Tensor:
    """(B, C, Y, X) -> (B, N, P), P in the order of a flattened (C, py, px) filter."""
    B, C, Y, X = x.shape
    x = x.reshape(B, C, Y // py, py, X // px, px)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(B, (Y // py) * (X // px), C * py * px)


def _fold(rows: Tensor, image: Tensor, py: int, px: int) -> Tensor:
    """The inverse of _unfold, for an image of the given shape."""
    B, C, Y, X = image.shape
    x = rows.reshape(B, Y // py, X // px, C, py, px)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(B, C, Y, X)


def reference(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix: Tensor | None,
    position: Tensor | None,
    mean: Tensor | None,
    std: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor]:
    x = _pixels(image, weight.dtype, mean, std)
    b = None if bias is None else bias.to(weight.dtype)
    y = F.linear(_unfold(x, *weight.shape[2:]), weight.flatten(1), b)  # (B, N, D)
    if position is not None:
        y = y + position.to(y.dtype)
    if prefix is not None:
        y = torch.cat([prefix.to(y.dtype).expand(y.shape[0], -1, -1), y], 1)  # (B, S, D)
    return (philox.dropout(y, dropout_p, seed).contiguous(),)


def backward(grad: Tensor, args: tuple, saved: list[Tensor], needs: frozenset[str]) -> list[Tensor]:
    given = dict(zip(OP.arguments, args, strict=True))
    image, weight, _, prefix, _, mean, std, dropout_p, seed = args
    py, px = weight.shape[2:]
    T = 0 if prefix is None else prefix.shape[0]
    g = philox.dropout(wide(grad), dropout_p, seed)
    gpatch = g[:, T:]  # (B, N, D)

    def dimage() -> Tensor:
        d = _fold(gpatch @ wide(weight).flatten(1), image, py, px)
        return d if std is None else d / wide(std)[:, None, None]

    grads = {
        "image": dimage,
        "weight": lambda: outer(
            gpatch, _unfold(_pixels(image, wide(weight).dtype, mean, std), py, px)
        ),
        "bias": lambda: rows_sum(gpatch),
        "prefix": lambda: g[:, :T].sum(0),
        "position": lambda: gpatch.sum(0),
    }
    return ordered(needs, OP.arguments, grads, given)


def _tokens(n: dict[str, int]) -> dict[str, int]:
    """Patches and tokens that follow from the image, the patch and the prefix."""
    if not (n["py"] and n["px"]) or n["Y"] % n["py"] or n["X"] % n["px"]:
        raise ValueError(
            f"patch_embed: an image of {n['Y']}x{n['X']} pixels does not divide into patches of"
            f" {n['py']}x{n['px']}; resize or pad it"
        )
    patches = (n["Y"] // n["py"]) * (n["X"] // n["px"])
    return {"N": patches, "S": n.get("T", 0) + patches}


OP = Operator(
    name="patch_embed",
    schema="Tensor image, Tensor weight, Tensor? bias, Tensor? prefix, Tensor? position,"
    " Tensor? mean, Tensor? std, float dropout_p, Tensor? seed",
    axes={
        "image": "B C Y X",
        "weight": "D C py px",
        "bias": "D",
        "prefix": "T D",
        "position": "N D",
        "mean": "C",
        "std": "C",
        "seed": "1",
    },
    outputs={"y": ("B S D", "weight")},
    reference=reference,
    backward=backward,
    differentiable=("image", "weight", "bias", "prefix", "position"),
    native="vitkern.cpu:patch_embed",
    derive=_tokens,
    integers=frozenset({"image", "seed"}),
)


def _bytes(shape: list[int], g: torch.Generator, n: Axes) -> Tensor:
    """Pixels as a decoder gives them: uint8, channels last, seen as (B, C, Y, X)."""
    B, C, Y, X = shape
    return torch.randint(256, (B, Y, X, C), generator=g, dtype=torch.uint8).permute(0, 3, 1, 2)


def _positive(shape: list[int], g: torch.Generator, n: Axes) -> Tensor:
    return torch.rand(shape, generator=g) + 0.2


_CASES = (
    {"B": 1, "C": 1, "Y": 1, "X": 1, "py": 1, "px": 1, "D": 1, "T": 0},
    {"B": 0, "C": 3, "Y": 8, "X": 8, "py": 4, "px": 4, "D": 5, "T": 1},
    {"B": 2, "C": 2, "Y": 9, "X": 15, "py": 3, "px": 5, "D": 17, "T": 2},
    {"B": 1, "C": 3, "Y": 42, "X": 28, "py": 14, "px": 14, "D": 67, "T": 5},
    {"B": 2, "C": 3, "Y": 64, "X": 64, "py": 16, "px": 16, "D": 192, "T": 1},
)
_BENCH = tuple(
    {"B": b, "C": 3, "Y": 224, "X": 224, "py": 16, "px": 16, "D": d, "T": 1}
    for b in (1, 8)
    for d in (192, 384, 768)
)


def _spec(
    suffix: str,
    formula: str,
    inputs: tuple[str, ...],
    p: float = 0.0,
    bench: tuple[Axes, ...] = (),
) -> OpSpec:
    return OpSpec(
        name="patch_embed" + suffix,
        op=OP,
        formula=formula,
        inputs=inputs,
        scalars={"dropout_p": p},
        makers={"seed": philox.make_seed, "std": _positive}
        | ({"image": _bytes} if "uint8" in suffix else {}),
        flops=lambda n: 2 * n["B"] * n["N"] * n["D"] * n["C"] * n["py"] * n["px"],
        cases=_CASES,
        bench=bench,
    )


register(
    _spec(
        "",
        "y = [prefix; unfold(image) weight^T + bias + position]",
        ("image", "weight", "bias", "prefix", "position"),
        bench=_BENCH,
    ),
    _spec(
        "+uint8",
        "y = [prefix; unfold((image / 255 - mean) / std) weight^T + bias + position]",
        ("image", "weight", "bias", "prefix", "position", "mean", "std"),
        bench=_BENCH[2:3] + _BENCH[5:],
    ),
    _spec("+dropout", "y = dropout(unfold(image) weight^T)", ("image", "weight", "seed"), 0.3),
)
_op = _library.define(OP)


def patch_embed(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    prefix: Tensor | None = None,
    position: Tensor | None = None,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Tokens (B, S, D) of an image (B, C, Y, X), in weight's dtype.

    The image is read in place by stride, so channels-last pixels are `image.permute(0, 3, 1, 2)`.
    uint8 pixels are divided by 255; mean and std (C,) then normalise. prefix (T, D) are ready-made
    rows, position (N, D) is added to the patches' rows.
    """
    check_tensor("patch_embed", "image", image)
    philox.check("patch_embed", seed, dropout_p=dropout_p)
    if (mean is None) != (std is None):
        raise ValueError("patch_embed: mean and std go together; give both or neither")
    if not (image.is_floating_point() or image.dtype == torch.uint8):
        raise TypeError(f"patch_embed: image must be floating point or uint8, got {image.dtype}")
    return _op(image, weight, bias, prefix, position, mean, std, dropout_p, seed)
