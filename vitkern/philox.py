"""Dropout as a pure function of (seed, stream, element index): Philox-4x32-10.

Word i % 4 of the block with counter (i // 4, stream) and key seed decides element i: it is kept
when its top 24 bits are at least threshold(p). The C++ and Triton kernels compute the same words,
so masks agree to the bit. Every layer takes streams, threshold and scale from here.
"""

import torch
from torch import Tensor

ELEMENTS, PATH, HIDDEN = 0, 1, 2  # streams: results, samples (drop-path), the MLP's hidden rows

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def words(seed: Tensor, stream: int, count: int) -> Tensor:
    """The first `count` words of a stream: (count,) int64 in [0, 2**32)."""
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    c0, c1 = block & _LOW, block >> 32
    c2, c3 = torch.full_like(block, stream), torch.zeros_like(block)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # All 64 bits of both multiplications: where int64 wraps around, the bits are the same.
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return torch.stack([c0, c1, c2, c3], 1).flatten()[:count]


def threshold(p: float) -> int:
    """The smallest kept value of a word's top 24 bits."""
    return round(p * 2**24)


def dropout_mask(seed: Tensor, p: float, shape: tuple[int, ...], stream: int = ELEMENTS) -> Tensor:
    """True where an element is kept; `shape` is indexed in row-major order."""
    count = 1
    for size in shape:
        count *= size
    return ((words(seed, stream, count) >> 8) >= threshold(p)).view(shape)


def drop_path_mask(seed: Tensor, p: float, B: int) -> Tensor:
    """True for the samples whose branch is kept: (B,)."""
    return dropout_mask(seed, p, (B,), PATH)


def scale(p: float) -> float:
    """What a kept element is multiplied by, so that the expectation stays."""
    return 1 / (1 - p) if p < 1 else 0.0


def masked(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x where it is kept, scaled; 0 elsewhere, whatever x is there."""
    return torch.where(keep, x * scale(p), torch.zeros((), dtype=x.dtype, device=x.device))


def dropout(x: Tensor, p: float, seed: Tensor | None, stream: int = ELEMENTS) -> Tensor:
    """x with its elements dropped at rate p; the seed may be missing where p is 0."""
    if p == 0:
        return x
    return masked(x, dropout_mask(given(seed), p, tuple(x.shape), stream), p)


def drop_path(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Drop whole samples (the first axis of x)."""
    if p == 0:
        return x
    return masked(x, drop_path_mask(given(seed), p, x.shape[0]).view(-1, *[1] * (x.ndim - 1)), p)


def given(seed: Tensor | None) -> Tensor:
    """The seed of a dropout that is on."""
    if seed is None:
        raise ValueError("dropout needs seed, an int64 tensor of one element")
    return seed


def make_seed(shape: list[int], g: torch.Generator, axes: object) -> Tensor:
    """A seed for a test case (registry.OpSpec.makers)."""
    return torch.randint(2**62, (1,), generator=g)


def check(op: str, seed: Tensor | None, **probabilities: float) -> None:
    """A clear error for a probability outside [0, 1] or a missing seed."""
    for name, p in probabilities.items():
        if not 0 <= p <= 1:
            raise ValueError(f"{op}: {name}={p} is not a probability in [0, 1]")
        if p and not (isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.numel() == 1):
            raise ValueError(
                f"{op}: {name}={p} needs seed, an int64 tensor of one element; draw it with"
                f" torch.randint(2**62, (1,))"
            )
