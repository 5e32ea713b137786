"""The kernel interpreter (tests/interpreter) computes and rounds as a GPU does."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.evidence.interpreter import Interpreter
from vitkern import philox as philox_reference
from vitkern.gpu import activations, moments, philox
from vitkern.gpu.configs import Row
from vitkern.gpu.launch import cdiv, executing, launch
from vitkern.ops import activations as activations_reference

EPS = 2**-23  # fp32


def run(kernel, grid, writes="y", interpreter=None, **arguments):
    with executing(interpreter or Interpreter()):
        launch(kernel, grid, Row({}, 4, 1, ""), tuple(writes.split()), **arguments)


@triton.jit
def convert(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def bits(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rounds_to_16_bits_as_torch_does(dtype):
    high = np.arange(2**16, dtype=np.uint32) << 16  # every sign, exponent and bf16 fraction
    lows = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # exact, ties and their neighbours for bf16
    lows += (0x0FFF, 0x1000, 0x1001, 0x3000)  # and for fp16
    x = bits(np.concatenate([high | low for low in lows]))
    y = torch.empty_like(x, dtype=dtype)
    run(convert, (cdiv(len(x), 2**16),), x=x, y=y, n=len(x), B=2**16)
    expected = x.to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    same = y.view(torch.int16) == expected.view(torch.int16)
    assert (same | expected.isnan()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_widens_16_bits_exactly(dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    y = torch.empty_like(x, dtype=torch.float32)
    run(convert, (1,), x=x, y=y, n=len(x), B=2**16)
    assert torch.equal(y.nan_to_num(7), x.float().nan_to_num(7))


@triton.jit
def arithmetic(x, z, y, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(z + i)
    tl.store(y + i, a * b)
    tl.store(y + B + i, a + b)
    tl.store(y + 2 * B + i, a - b * 0.3)
    tl.store(y + 3 * B + i, a / b)
    tl.store(y + 4 * B + i, tl.maximum(a, b))
    tl.store(y + 5 * B, tl.max(a, 0))
    tl.store(y + 5 * B + 1, tl.sum(a, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_arithmetic_rounds_after_every_operation(dtype):
    x, z = (torch.randn(256).to(dtype) for _ in range(2))
    y = torch.empty(5 * 256 + 2, dtype=dtype)
    run(arithmetic, (1,), x=x, z=z, y=y, B=256)
    parts = [x * z, x + z, x - z * torch.tensor(0.3, dtype=dtype), x / z, torch.maximum(x, z)]
    assert torch.equal(y[:1280], torch.cat(parts))
    total = x
    while len(total) > 1:  # halves are added, and rounded, as a GPU's warps do
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    assert y[1280] == x.max() and y[1281] == total


# ---- dots ----


@triton.jit
def product(x, w, y, K, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, K, BK, num_stages=2):
        a = tl.load(x + m[:, None] * K + start + k[None, :])
        b = tl.load(w + n[:, None] * K + start + k[None, :])
        acc = tl.dot(a, tl.trans(b), acc, input_precision=P)
    tl.store(y + m[:, None] * N + n[None, :], acc)


def truncated(x):
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def nearest_tf32(x):
    return truncated((x.view(torch.int32) + 0x1000).view(torch.float32))


def operands(x, precision):
    """The pairs of factors whose products a dot adds, as (left, right) selectors of x."""
    if precision == "tf32":
        return [truncated(x)]
    if precision == "tf32x3":
        return [nearest_tf32(x), truncated(x - nearest_tf32(x))]
    return [x]


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.bfloat16, "tf32"),
        (torch.float16, "tf32"),
        (torch.float32, "tf32"),
        (torch.float32, "tf32x3"),
        (torch.float32, "ieee"),
    ],
    ids=["bf16", "fp16", "tf32", "tf32x3", "ieee"],
)
def test_dots_round_their_factors_as_tensor_cores_do(dtype, precision):
    torch.manual_seed(0)
    x, w = torch.randn(64, 96).to(dtype), torch.randn(32, 96).to(dtype)
    y = torch.empty(64, 32)
    run(product, (1,), x=x, w=w, y=y, K=96, P=precision, M=64, N=32, BK=32)
    precision = "ieee" if dtype != torch.float32 else precision
    left, right = operands(x.float(), precision), operands(w.float(), precision)
    model = torch.zeros(64, 32, dtype=torch.float64)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            if i + j < 2:  # the product of the two small halves is left out
                model += a.double() @ b.double().T
    size = x.double().abs() @ w.double().abs().T
    assert ((y - model).abs() <= 2 * EPS * size).all()  # the sums are fp32's
    exact = x.double() @ w.double().T
    error = ((y - exact).abs() / size).max()
    low, high = {"tf32": (2e-4, 2e-3), "tf32x3": (0, 3e-7), "ieee": (0, 2 * EPS)}[precision]
    assert low <= error <= high


def test_small_dots_are_refused_as_by_the_compiler():
    x = torch.zeros(64, 8)
    with pytest.raises(AssertionError, match="K >= 16"):
        run(product, (1,), x=x, w=x, y=torch.empty(64, 64), K=8, P="tf32", M=64, N=64, BK=8)


# ---- the language ----

_SCALE = tl.constexpr(3.0)


@triton.jit
def scaled(x, bias=None, TIMES: tl.constexpr = _SCALE):
    if bias is not None:
        x += tl.load(bias)
    return x, tl.sigmoid(TIMES * x)


@triton.jit
def language(x, codes, bias, absent, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if absent is not None:
        i += tl.load(absent)
    live = (i < n) & (i >= 0)
    if n > 2 and not (n < 0 or B < 0):
        live = live & True
    a = tl.load(x + i, mask=live, other=0.0)
    moved, squashed = scaled(a, bias)
    total = tl.zeros((B,), tl.float32)
    for k in range(2):  # the loop variable is an int32 tensor
        total += squashed * k.to(tl.int64).to(tl.float32)
    for k in tl.static_range(1, 3):
        total += k
    code = tl.load(codes + i, mask=live, other=0).to(tl.float32)
    pairs = tl.reshape(tl.join(total, code), (B // 2, 2, 2)).trans(2, 1, 0)
    tl.store(y + tl.arange(0, 2 * B), tl.reshape(pairs, (2 * B,)))
    tl.store(y + 2 * B + i, libdevice.tanh(moved) + tl.math.erf(a), mask=live)
    tl.store(y + 3 * B, tl.cdiv(n, 4) + min(n, 3))
    tl.store(y + 3 * B + 1, tl.argmax(tl.where(live, a, float("-inf")), 0))
    tl.store(y + 3 * B + 2, tl.sum(tl.cumsum(a, 0), 0))


def test_the_language_means_what_it_means_compiled():
    n, B = 30, 32
    x, bias = torch.randn(n), torch.tensor([0.5])
    codes = torch.randint(256, (n,), dtype=torch.uint8)
    y = torch.zeros(3 * B + 3)
    run(language, (1,), x=x, codes=codes, bias=bias, absent=None, y=y, n=n, B=B)
    total = torch.nn.functional.pad(x, (0, 2)).add(0.5).mul(3).sigmoid() + 3
    pairs = torch.stack([total, torch.nn.functional.pad(codes.float(), (0, 2))], -1)
    expected = pairs.view(B // 2, 2, 2).permute(2, 1, 0).reshape(-1)
    torch.testing.assert_close(y[: 2 * B], expected)
    torch.testing.assert_close(y[2 * B :][:n], (x + 0.5).tanh() + x.erf())
    assert y[3 * B] == 8 + 3 and y[3 * B + 1] == x.argmax()
    torch.testing.assert_close(y[3 * B + 2], torch.nn.functional.pad(x, (0, 2)).cumsum(0).sum())


@triton.jit
def integers(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    big = a.to(tl.int32)
    word = big.to(tl.uint32, bitcast=True)
    tl.store(y + i, a // 7)
    tl.store(y + B + i, a % 7)
    tl.store(y + 2 * B + i, (word >> 3).to(tl.int64))
    tl.store(y + 3 * B + i, (big >> 3).to(tl.int64))
    tl.store(y + 4 * B + i, (word > 9).to(tl.int64))
    tl.store(y + 5 * B + i, tl.umulhi(word, 0xD2511F53).to(tl.int64))
    tl.store(y + 6 * B + i, tl.umulhi(a.to(tl.uint64, bitcast=True), a.to(tl.uint64, bitcast=True)))
    tl.store(y + 7 * B + i, (big * 65537).to(tl.int64))
    tl.store(y + 8 * B + i, (a.to(tl.float32) * 2.5).to(tl.int32).to(tl.int64))


def test_integers_wrap_divide_and_compare_as_in_c():
    values = [-(2**31), -100, -15, -7, -1, 0, 1, 6, 7, 15, 1000, 2**31 - 1, -8, 8, 254, 255]
    x = torch.tensor(values)
    y = torch.empty(9, 16, dtype=torch.int64)
    run(integers, (1,), x=x, y=y, B=16)
    wrapped = [((v * 65537 + 2**31) % 2**32) - 2**31 for v in values]
    wide = [((v % 2**64) ** 2) >> 64 for v in values]
    expected = [
        [int(v / 7) for v in values],
        [v - int(v / 7) * 7 for v in values],
        [(v % 2**32) >> 3 for v in values],
        [v >> 3 for v in values],
        [v % 2**32 > 9 for v in values],
        [((v % 2**32) * 0xD2511F53) >> 32 for v in values],
        [v - 2**64 if v >= 2**63 else v for v in wide],
        wrapped,
        [max(-(2**31), min(2**31 - 1, int(v * 2.5))) for v in values],
    ]
    assert torch.equal(y, torch.tensor(expected, dtype=torch.int64))


@triton.jit
def count(y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(y + i % 3, i, mask=i < 7)
    before = tl.atomic_max(y + 3, tl.program_id(0))
    tl.store(y + 4 + tl.program_id(0), before)


def test_atomics_add_one_element_after_the_other():
    y = torch.zeros(7, dtype=torch.int32)
    run(count, (3,), y=y, B=8)
    assert y.tolist() == [3 * (0 + 3 + 6), 3 * (1 + 4), 3 * (2 + 5), 2, 0, 0, 1]


# ---- vitkern's device functions ----


@triton.jit
def masks(seed, y, M, N, limit, STREAM: tl.constexpr, QUADS: tl.constexpr, TILE: tl.constexpr):
    rows, columns = tl.program_id(0) * 8 + tl.arange(0, 8), tl.program_id(1) * 32
    inside = (rows < M)[:, None] & ((columns + tl.arange(0, 32)) < N)[None, :]
    at = rows[:, None] * N + columns + tl.arange(0, 32)[None, :]
    if TILE:
        kept = philox.keep_tile(seed, rows, columns, N, limit, STREAM, 32, QUADS)
    else:
        kept = philox.keep(seed, at.to(tl.int64), limit, STREAM)
    tl.store(y + at, kept.to(tl.uint8), mask=inside)


@pytest.mark.parametrize(
    ("N", "quads", "tile"),
    [(67, False, False), (67, False, True), (68, True, True)],
    ids=["keep", "keep_tile", "keep_tile-quads"],
)
def test_dropout_masks_are_the_references_to_the_bit(N, quads, tile):
    seed = torch.tensor([0x3A5F_0123_89AB_CDEF])
    y = torch.empty(21, N, dtype=torch.uint8)
    limit = philox_reference.threshold(0.3)
    sizes = {"M": 21, "N": N, "limit": limit, "STREAM": 2, "QUADS": quads, "TILE": tile}
    run(masks, (3, 3), seed=seed, y=y, **sizes)
    assert torch.equal(y.bool(), philox_reference.dropout_mask(seed, 0.3, (21, N), 2))


@triton.jit
def activation(x, y, NAME: tl.constexpr, SLOPE: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    tl.store(y + i, activations.derivative(a, NAME) if SLOPE else activations.activate(a, NAME))


@pytest.mark.parametrize("slope", [False, True], ids=["value", "derivative"])
@pytest.mark.parametrize("name", activations_reference.ACTIVATIONS)
def test_activations_match_torch(name, slope):
    x = torch.linspace(-12, 12, 4096)
    y = torch.empty_like(x)
    run(activation, (1,), x=x, y=y, NAME=name, SLOPE=slope, B=4096)
    exact = x.double().requires_grad_()
    expected = activations_reference.activation(name)(exact)
    if slope:
        (expected,) = torch.autograd.grad(expected.sum(), exact)
    # where exp(-x) meets 1, errors are those of the terms, of size 1 (x for the product with x)
    size = torch.maximum(expected.abs(), x.abs().clamp(max=1).double())
    assert ((y - expected).abs() <= 6 * EPS * size).all()


@triton.jit
def statistics(x, parts, y, M, D, eps, BN: tl.constexpr):
    rows = tl.arange(0, 4)
    live = rows < M
    for part in range(tl.cdiv(D, BN)):
        columns = part * BN + tl.arange(0, BN)
        inside = live[:, None] & (columns < D)[None, :]
        tile = tl.load(x + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)
        moments.store(parts, part, rows, live, tile, columns, M, D, 4, BN)
    mean, rstd = moments.load(parts, rows, live, M, D, eps, BN)
    tl.store(y + rows, mean, mask=live)
    tl.store(y + M + rows, rstd, mask=live)


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_moments_match_torch(mean):
    x = torch.randn(3, 100) + mean
    parts, y = torch.empty(4, 3, 2), torch.empty(2, 3)
    run(statistics, (1,), "parts y", x=x, parts=parts, y=y, M=3, D=100, eps=1e-6, BN=32)
    rstd = (x.double().var(1, unbiased=False) + 1e-6).rsqrt()
    torch.testing.assert_close(y[0].double(), x.double().mean(1), rtol=4 * EPS, atol=4 * EPS)
    torch.testing.assert_close(y[1].double(), rstd, rtol=(16 + mean / 10) * EPS, atol=0)
