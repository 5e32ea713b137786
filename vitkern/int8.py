"""The precision int8: how matrices become 8-bit integers, and what a linear layer of them is.

A row of a weight is s8 times one scale; a row of activations is u8, with a scale and a zero of its
own that are found when it is computed. Nothing is calibrated. Sums of integers are exact, so
`linear` here has the bits of csrc/cpu/tiles_int8.hpp on every instruction set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .model import ViT

LARGEST = 127
# Where a CPU adds four products in 16 bits (csrc/cpu/dot_int8.hpp): weights of one sign among them.
MOST_OF_FOUR = 128
SMALLEST_SCALE = 1e-30  # below, a row of activations is zero: the inverse may overflow
# Attribute of a model whose parameters were restored with the values of integers: these, by name.
RESTORED = "restored_integers"
# A norm and the linear layers that may read it; outlier columns move from one to the others.
SMOOTHED = (
    ("norm1", ("attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj")),
    ("norm2", ("mlp.fc1", "mlp.fc1_g", "mlp.fc1_x")),
)


class Quantised(NamedTuple):
    """A weight (N, ...) as integers and the scale of each of its N rows."""

    integers: Tensor  # int8
    scales: Tensor  # (N) float32

    def values(self) -> Tensor:
        """The weight that the integers stand for, in float32."""
        return self.integers * self.scales.view(-1, *[1] * (self.integers.ndim - 1))


class Held(NamedTuple):
    """A weight that a model holds as integers, in place of its parameter or beside it."""

    weight: Quantised
    by: Tensor | None  # what columns were multiplied with before (`smoothing`); None: nothing

    def values(self) -> Tensor:
        """What the integers stand for, in float32, before the columns were multiplied."""
        values = self.weight.values()
        return values if self.by is None else values.div_(self.by)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return self  # it never changes


def quantise_weight(weight: Tensor) -> Quantised:
    """A weight (N, ...) by the smallest scales that its integers fit with.

    They are within +-127, and among four that a CPU may add in 16 bits those of one sign add up to
    at most 128. A row that is not finite has the scale NaN.
    """
    rows = weight.detach().flatten(1).float()
    finite = rows.isfinite().all(1)
    rows = torch.where(finite[:, None], rows, 0)
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    scales = torch.maximum(largest / LARGEST, _of_four(rows) / MOST_OF_FOUR)
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    integers = _rounded(rows, scales)
    while True:  # rounding may add up to 2 to four of them: a few rows need a little more room
        wide = _of_four(integers) > MOST_OF_FOUR
        if not wide.any():
            break
        scales[wide] *= 1 + 1 / 256
        integers[wide] = _rounded(rows[wide], scales[wide])
    scales = torch.where(finite, torch.where(largest > 0, scales, 0), torch.nan)
    return Quantised(integers.to(torch.int8).view(weight.shape), scales)


def _rounded(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)


def _of_four(rows: Tensor) -> Tensor:
    """The largest sum of one sign that a row (N, K) has among four added in 16 bits: (N)."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
    fours = padded.view(len(rows), -1, 2, 2, 2)  # of 8 steps, [0, 1, 4, 5] and [2, 3, 6, 7]
    if not fours.shape[1]:
        return rows.new_zeros(len(rows))
    up, down = fours.clamp_min(0).sum((2, 4)), fours.clamp_max(0).sum((2, 4)).neg_()
    return torch.maximum(up, down).amax((1, 2))


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (..., K) as integers 0 to 255, with the zero (..., 1) and the scale (..., 1) of each."""
    x = x.float()
    low, high = x.amin(-1, True).clamp_max(0), x.amax(-1, True).clamp_min(0)
    scale = high / 255 - low / 255  # high - low may overflow
    usable = x.isfinite().all(-1, True) & (scale >= SMALLEST_SCALE)
    inverse = torch.where(usable, 1 / scale, 0)
    zero = (torch.where(usable, -low, 0) * inverse).round()
    integers = ((torch.where(usable, x, 0) * inverse).round() + zero).clamp(0, 255)
    scale = torch.where(usable, scale, torch.where(x.isfinite().all(-1, True), 0, torch.nan))
    return integers, zero, scale


def linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times a weight (N, K): what the engine computes in int8, to the bit."""
    integers, zero, scale = quantise_rows(x)
    sums = (integers - zero).double() @ weight.integers.flatten(1).double().mT  # exact
    y = sums.float() * weight.scales * scale
    return y if bias is None else y + bias.float()


def smoothing(norm_weight: Tensor, norm_bias: Tensor) -> Tensor:
    """What each column of a norm's result is divided by, and the next weight's multiplied by.

    A column's usual size follows from the norm alone: 3 |weight| + |bias|. Its square root, as a
    power of two so that nothing is rounded, shares outlier columns between both factors.
    """
    size = 3 * norm_weight.float().abs() + norm_bias.float().abs()
    size = size.clamp_min(size.amax() * 2**-24).clamp_min(torch.finfo(torch.float32).tiny)
    log = size.log2()
    return torch.where(log.isfinite().all(), ((log - log.mean()) / 2).round(), 0).exp2()


def parts_of(model: ViT) -> Iterator[tuple[str, Tensor | Quantised]]:
    """The parameters of a model that does the same, all matrices quantised, one after another.

    Those that the model holds as integers are given out as they are. Nothing is kept of the others.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    held = held_by(model)
    by = smoothings(model, held)
    for name in names:
        value = model.get_parameter(name).detach()
        if name in held:
            yield name, held[name].weight
        elif is_matrix(name, value):
            factor = by.get(name)
            yield name, quantise_weight(value if factor is None else value.float() * factor)
        else:
            factor = by.get(name.rpartition(".")[0])
            yield name, value if factor is None else value.float() / factor


def state_of(model: ViT) -> dict[str, Tensor | Quantised]:
    """All of `parts_of`."""
    return dict(parts_of(model))


def smoothings(model: ViT, held: Mapping[str, Held]) -> dict[str, Tensor]:
    """`smoothing` by the name of a norm and by those of the matrices that read it."""
    found: dict[str, Tensor] = {}
    for i in range(model.config.depth):
        for norm, readers in SMOOTHED:
            norm = f"blocks.{i}.{norm}"
            layers = [f"blocks.{i}.{layer}.weight" for layer in readers]
            there = [held[name] for name in layers if name in held]
            if there:  # quantised with it: the others that read this norm follow
                by = there[0].by
            else:
                weight, bias = (model.get_parameter(f"{norm}.{key}") for key in ("weight", "bias"))
                by = smoothing(weight.detach(), bias.detach())
            if by is not None:
                found |= dict.fromkeys((norm, *layers), by)
    return found


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is quantised: the weights of the blocks' four linear layers.

    The patch embedding and the head stay in fp32: they are 1 % of a ViT-B's multiply-adds, and
    nothing averages out what they round.
    """
    return name.startswith("blocks.") and parameter.ndim == 2 and name.endswith(".weight")


def held_by(model: ViT) -> dict[str, Held]:
    """The matrices that a model has as integers, by name."""
    released, beside = model.released, getattr(model, RESTORED, {})
    found: dict[str, Held] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if released is not None and parameter in released.integers:
            found[name] = released.integers[parameter]
        elif name in beside and torch.equal(beside[name].values(), parameter.float().cpu()):
            found[name] = beside[name]
    return found
