"""The PTX emulator's arithmetic against models of its own: Python's integers and fractions, torch.

The models are written from the manual once more, in another way.
"""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.ptx.snippets import apply, each

# ---- integers ----------------------------------------------------------------------------------

EDGES = [0, 1, 2, 3, 31, 32, 33, 255, -1, -2, -7, 2**31 - 1, -(2**31), 2**30, 123456789]


def numbers(kind, count=300, seed=0):
    bits = int(kind[1:])
    rng = random.Random(seed)
    found = [*EDGES, *(rng.getrandbits(rng.randint(1, bits)) for _ in range(count - len(EDGES)))]
    rng.shuffle(found)
    return [to_kind(x, kind) for x in found]


def to_kind(x, kind):
    bits = int(kind[1:])
    x &= 2**bits - 1
    return x - 2**bits if kind[0] == "s" and x >> (bits - 1) else x


def array(values, kind):
    return np.array(values, {"s": "i", "u": "u", "b": "u"}[kind[0]] + str(int(kind[1:]) // 8))


def truncated(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BINARY = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "div": lambda a, b, w: truncated(a, b),
    "rem": lambda a, b, w: a - b * truncated(a, b),
}


@pytest.mark.parametrize("op, kind", list(itertools.product(BINARY, ("s32", "u32", "s64", "u64"))))
def test_integer_arithmetic(op, kind):
    a, b = numbers(kind), numbers(kind, seed=1)
    if op in ("div", "rem"):
        b = [x or 7 for x in b]
        a = [0 if y == -1 else x for x, y in zip(a, b, strict=True)]  # -2**31 / -1 does not fit
    got = apply(f"{op}.{kind}", array([], kind).dtype, array(a, kind), array(b, kind))
    want = [BINARY[op](x, y, int(kind[1:])) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == [to_kind(x, kind) for x in want]


@pytest.mark.parametrize("kind", ("s32", "u32"))
def test_wide_products(kind):
    wide = kind[0] + "64"
    a, b, c = numbers(kind), numbers(kind, seed=1), numbers(wide, seed=2)
    inputs = [array(x, k) for x, k in ((a, kind), (b, kind), (c, wide))]
    got = apply(f"mad.wide.{kind}", inputs[2].dtype, *inputs)
    want = [to_kind(x * y + z, wide) for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == want
    assert apply(f"mul.wide.{kind}", inputs[2].dtype, *inputs[:2]).tolist() == [
        x * y for x, y in zip(a, b, strict=True)
    ]


@pytest.mark.parametrize("kind", ("b16", "b32", "b64", "s32", "s64", "u32", "u64"))
def test_shifts_of_any_length(kind):
    """Beyond the register's width everything is shifted out, or all sign."""
    width = int(kind[1:])
    a, by = numbers(kind), [x % (2 * width + 3) for x in numbers("u32", seed=1)]
    inputs = array(a, kind), array(by, "u32")
    if kind[0] == "b":
        got = apply(f"shl.{kind}", inputs[0].dtype, *inputs)
        assert got.tolist() == [to_kind(x << n, kind) for x, n in zip(a, by, strict=True)]
    got = apply(f"shr.{kind}", inputs[0].dtype, *inputs)
    assert got.tolist() == [x >> n for x, n in zip(a, by, strict=True)]


@pytest.mark.parametrize("kind", ("s32", "u32", "s64", "u64"))
def test_bit_fields(kind):
    """As the manual's loop has it, bit by bit."""
    width = int(kind[1:])
    a, b = numbers(kind), numbers(kind, seed=3)
    start = [x % 70 for x in numbers("u32", seed=1)]
    length = [x % 70 for x in numbers("u32", seed=2)]

    def extract(a, start, length):
        last = min(start + length - 1, width - 1)
        signed = kind[0] == "s" and length > 0
        fill = a >> last & 1 if signed else 0
        r = 0
        for bit in range(width):
            r |= (a >> (start + bit) & 1 if bit < length and start + bit < width else fill) << bit
        return to_kind(r, kind)

    inputs = [array(a, kind), array(start, "u32"), array(length, "u32")]
    got = apply(f"bfe.{kind}", inputs[0].dtype, *inputs)
    assert got.tolist() == [extract(*x) for x in zip(a, start, length, strict=True)]
    bits = "b" + kind[1:]
    a, b = ([to_kind(x, bits) for x in y] for y in (a, b))
    got = apply(f"bfi.{bits}", array(a, bits).dtype, array(a, bits), array(b, bits), *inputs[1:])
    for g, x, y, s, n in zip(got.tolist(), a, b, start, length, strict=True):
        for bit in range(min(n, max(0, width - s))):
            y = y & ~(1 << (s + bit)) | (x >> bit & 1) << (s + bit)
        assert g == y


def test_permutes_bytes():
    a, b, selector = (numbers("b32", seed=s) for s in range(3))
    got = apply("prmt.b32", np.uint32, *(array(x, "b32") for x in (a, b, selector)))
    for g, x, y, s in zip(got.tolist(), a, b, selector, strict=True):
        pool = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        want = []
        for n in range(4):
            choice = s >> 4 * n & 15
            byte = pool[choice & 7]
            want.append((255 if byte & 128 else 0) if choice & 8 else byte)
        assert g == int.from_bytes(bytes(want), "little")


def test_any_function_of_three_words():
    a, b, c = (numbers("b32", seed=s) for s in range(3))
    inputs = [array(x, "b32") for x in (a, b, c)]
    for table, want in ((0x80, lambda a, b, c: a & b & c), (0x96, lambda a, b, c: a ^ b ^ c)):
        got = apply("lop3.b32", np.uint32, *inputs, tail=f", {table}")
        assert got.tolist() == [want(*x) for x in zip(a, b, c, strict=True)]


def test_packs_and_unpacks():
    a = array(numbers("b32", 320), "b32")
    swapped = each("mov.b32 {%h1, %h2}, %r1; mov.b32 %r9, {%h2, %h1};", a)
    assert swapped.tolist() == [(x >> 16 | x << 16) & 0xFFFFFFFF for x in a.tolist()]
    upper = each("mov.b64 %rd9, {%r0, %r1}; mov.b64 {_, %r9}, %rd9;", a)
    assert upper.tolist() == a.tolist()


# ---- floats ------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38]


def floats(count=320, seed=0, spread=20):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-spread, spread, count)
    x[: len(SPECIAL)] = SPECIAL
    return rng.permutation(x.astype(np.float32))


def same(got, want):
    """Equal numbers (zeros of either sign apart), NaN where NaN is wanted."""
    assert np.array_equal(np.isnan(got), np.isnan(want))
    good = ~np.isnan(want)
    assert np.array_equal(got[good], want[good])
    assert np.array_equal(np.signbit(got[good]), np.signbit(want[good]))


def nearest(exact: Fraction, guess: np.float32) -> np.float32:
    """The float32 nearest to a fraction, ties to even, among a guess and its neighbours."""
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(9e9))]
    around = [x for x in around if np.isfinite(x)]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_fma_rounds_once():
    a, b = floats(640, 1)[:600], floats(640, 2)[:600]
    a[np.abs(a) > 1e30] = b[np.abs(b) > 1e30] = 1
    c = -(a * b) * np.float32(1 + 2**-20)  # most of the sum cancels
    # 1 + 2**-23 (odd) plus just over half a unit: float64 would make a tie of it, and round down
    hard = [(1 + 2**-12, 1 + 2**-12, 2.0**-60), (1 + 2**-23, 1.0, 2.0**-24 + 2.0**-48)]
    hard += [(2**-75, 2**-75, 2**-126 * 1.5), (1.5 * 2**-74, 2**-75, 2**-149)]  # subnormal results
    for n, row in enumerate(hard):
        a[n], b[n], c[n] = row
    good = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[good], b[good], c[good]
    got = apply("fma.rn.f32", np.float32, a, b, c)
    for g, x, y, z in zip(got, a, b, c, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if abs(exact) < 2**127:
            assert g == nearest(exact, g), (x, y, z)


def test_subnormal_numbers_are_flushed_only_if_asked():
    tiny = np.array([1e-40, -1e-40, 2e-38, -2e-38] * 8, np.float32)
    half = np.full(32, 0.25, np.float32)
    same(apply("mul.f32", np.float32, tiny, half), tiny * half)
    same(apply("mul.ftz.f32", np.float32, tiny, half), np.copysign(np.float32(0), tiny))
    same(apply("abs.ftz.f32", np.float32, tiny)[:4], np.array([0, 0, 2e-38, 2e-38], np.float32))


def test_minimum_and_maximum_of_nan():
    a, b = floats(seed=1), floats(seed=2)
    nan = np.isnan(a) | np.isnan(b)
    assert nan.any()
    same(apply("max.f32", np.float32, a, b), np.where(np.isnan(a), b, np.where(a < b, b, a)))
    want = np.where(nan, np.float32(np.nan), np.minimum(a, b))
    same(apply("min.NaN.f32", np.float32, a, b), want)


def test_largest_of_three():
    a, b, c = (floats(seed=s) for s in (1, 2, 3))
    same(apply("max.f32", np.float32, a, b, c), np.fmax(np.fmax(a, b), c))


def test_pairs_of_floats():
    a, b, c = (floats(640, s, 10) for s in (1, 2, 3))
    words = [x.view(np.uint64) for x in (a, b, c)]
    same(apply("add.rn.f32x2", np.uint64, *words[:2]).view(np.float32), a + b)
    want = apply("fma.rn.f32", np.float32, a, b, c)
    same(apply("fma.rn.f32x2", np.uint64, *words).view(np.float32), want)


def test_comparisons_of_nan():
    values = [float("nan"), float("-inf"), -1.0, 0.0, 2.0]
    a, b = (np.resize(x, 32) for x in np.array(list(itertools.product(values, values)), "f4").T)
    nan = np.isnan(a) | np.isnan(b)
    ordered = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    wanted = {"num": ~nan, "nan": nan}
    for name, truth in ordered.items():
        wanted |= {name: truth & ~nan, f"{name}u": truth | nan}
    for name, want in wanted.items():
        body = f"setp.{name}.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;"
        assert each(body, a, b).tolist() == want.tolist(), name


def test_comparison_joined_with_a_predicate():
    a = np.arange(32, dtype=np.uint32)
    body = """setp.lt.u32 %p1, %r1, 20; setp.gt.and.u32 %p2|%p3, %r1, 7, !%p1;
      selp.b32 %r8, 1, 0, %p2; selp.b32 %r9, 2, 0, %p3; or.b32 %r9, %r8, %r9;"""
    assert each(body, a).tolist() == [int(x >= 20 and x > 7) for x in range(32)]


def test_approximate_functions_are_near():
    x = np.abs(floats(spread=10)) + np.float32(1e-6)
    x = x[np.isfinite(x)]
    y = x.astype(np.float64)
    functions = {
        "ex2.approx.ftz": np.exp2(np.clip(y, 0, 120)),
        "lg2.approx": np.log2(y),
        "rcp.approx.ftz": 1 / y,
        "sqrt.approx": np.sqrt(y),
        "rsqrt.approx": 1 / np.sqrt(y),
        "tanh.approx": np.tanh(y),
    }
    for name, want in functions.items():
        given = np.clip(x, 0, 120) if "ex2" in name else x
        got = apply(f"{name}.f32", np.float32, given)
        assert np.allclose(got, want, rtol=2**-22, atol=2**-22), name


# ---- conversions -------------------------------------------------------------------------------

TIES = np.array(
    [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-8, 65520, 6e-8, 9e-8]
)


def rounded(x, kind):
    return torch.from_numpy(x).to({"bf16": torch.bfloat16, "f16": torch.float16}[kind])


@pytest.mark.parametrize("kind", ("bf16", "f16"))
def test_rounds_to_16_bits_as_torch_does(kind):
    x = np.concatenate([floats(310), TIES.astype(np.float32)])
    got = apply(f"cvt.rn.{kind}.f32", np.uint16, x).view(np.int16)
    same(
        torch.from_numpy(got).view(rounded(x, kind).dtype).float().numpy(),
        rounded(x, kind).float().numpy(),
    )
    both = each(f"cvt.rn.{kind}x2.f32 %r9, %r1, %r2;", x[:288], x[:288][::-1])  # upper, lower
    for part, want in ((both >> 16, x[:288]), (both & 0xFFFF, x[:288][::-1])):
        part = torch.from_numpy(part.astype(np.uint16).view(np.int16))
        want = rounded(want.copy(), kind)
        same(part.view(want.dtype).float().numpy(), want.float().numpy())
    back = apply(f"cvt.f32.{kind}", np.float32, got)
    same(back, rounded(x, kind).float().numpy())


def test_tf32_rounds_ties_away_from_zero():
    x = floats(320)
    x[:6] = 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 1 + 2**-11 - 2**-23, 1 + 2**-12, 2 - 2**-23
    got = apply("cvt.rna.tf32.f32", np.float32, x)
    for g, value in zip(got, x, strict=True):
        if np.isfinite(value) and abs(value) > 1e-37:
            unit = Fraction(2) ** (int(np.frexp(value)[1]) - 11)
            whole = abs(Fraction(float(value))) / unit + Fraction(1, 2)
            want = float((whole.numerator // whole.denominator) * unit)
            assert abs(g) == want and np.signbit(g) == np.signbit(value)
        elif not np.isfinite(value):
            same(np.array([g]), np.array([value]))


@pytest.mark.parametrize("how", ("rzi", "rni", "rmi", "rpi"))
@pytest.mark.parametrize("kind", ("s32", "u32", "s64", "u8"))
def test_floats_to_integers_saturate(how, kind):
    x = np.concatenate([floats(310, spread=34), np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e30], "f4")])
    wide = "u32" if kind == "u8" else kind
    got = apply(f"cvt.{how}.{kind}.f32", array([], wide).dtype, x)
    whole = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[how]
    bits = int(kind[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)
    for g, value in zip(got.tolist(), x.tolist(), strict=True):
        if value != value:
            assert g == 0
        else:
            value = max(-1e30, min(value, 1e30))
            assert g == max(low, min(int(whole(value)), high)), value


def test_integers_to_floats_and_to_other_integers():
    a = array(numbers("s32"), "s32")
    same(apply("cvt.rn.f32.s32", np.float32, a), a.astype(np.float32))
    same(apply("cvt.rn.f32.u32", np.float32, a), a.view(np.uint32).astype(np.float32))
    assert apply("cvt.s64.s32", np.int64, a).tolist() == a.tolist()
    assert apply("cvt.u64.u32", np.int64, a).tolist() == a.view(np.uint32).tolist()
    assert apply("cvt.u16.u32", np.uint16, a).tolist() == a.astype(np.uint16).tolist()
    assert apply("cvt.s32.s8", np.int32, a).tolist() == a.astype(np.int8).tolist()
    assert apply("cvt.sat.s8.s32", np.int32, a).tolist() == np.clip(a, -128, 127).tolist()


@pytest.mark.parametrize("kind", ("bf16", "f16"))
def test_pairs_of_16_bit_numbers(kind):
    """Each half by itself; a fused product is rounded once, from float64's exact enough sum."""
    a, b, c = (rounded(floats(640, s, 4), kind) for s in (1, 2, 3))
    words = [x.view(torch.int16).numpy().view(np.uint32) for x in (a, b, c)]
    x, y, z = (t.double() for t in (a, b, c))
    results = {"fma.rn": x * y + z, "mul.rn": x * y, "add.rn": x + y, "sub.rn": x - y}
    for op, want in results.items():
        if kind == "bf16" and op != "fma.rn":  # sm_90 has the others
            continue
        got = apply(f"{op}.{kind}x2", np.uint32, *words[: 3 if op == "fma.rn" else 2])
        got = torch.from_numpy(got.view(np.int16)).view(a.dtype)
        same(got.float().numpy(), want.to(a.dtype).float().numpy())
    wide, bits = floats(640, 4), a.view(torch.int16).numpy()
    same(apply(f"add.rn.f32.{kind}", np.float32, bits, wide), a.float().numpy() + wide)
