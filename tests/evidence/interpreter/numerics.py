"""What a GPU computes, in numpy: the values and the operations of Triton's intermediate language.

Integers are signless, as in that language: an operation says how it reads them. 16-bit floats are
kept as the fp32 numbers they stand for and rounded after every operation. Shapes are lazy: the data
of a value may have extent 1 where the value repeats, so masks and offsets are computed once.

Modelled for NVIDIA after the code that Triton 3.7 emits: 16-bit dots accumulate in fp32; "tf32"
dots drop the low 13 bits of their operands (no conversion is emitted, the tensor core ignores
them); "tf32x3" splits each operand in a rounded half and a truncated rest and adds three products;
exp(x) is 2 ** (x * log2 e), the product rounded to fp32; sums of 16-bit floats round at every step.
Division, roots and elementary functions are exact to the last bit here and to two units there;
a * b + c is not fused; sums add pairwise.

A dot adds as many exact products at once as a tensor core does, in ascending k, and rounds
(fixed_order.c); an elementary function is computed in fp64 and rounded. No result depends on which
BLAS or which vector library the host's CPU selects, nor on the batch around a row.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
from triton._C.libtriton import ir

from tests.evidence import fixed_order


def check_version(version: str) -> None:
    """The interpreter uses internals of triton, which change with its minor version."""
    if not version.startswith("3.7."):
        raise ImportError(
            f"vitkern's kernel interpreter needs triton 3.7, but {version} is installed:"
            f" pip install 'triton==3.7.1'"
        )


check_version(triton.__version__)


class Kind:
    """An element type: how it lies in memory and what numpy type its numbers are held in."""

    __slots__ = ("bits", "data", "element", "is_float", "memory", "name")

    def __init__(self, name, bits, memory, data=None, is_float=False, element=None):
        self.name, self.bits, self.is_float, self.element = name, bits, is_float, element
        self.memory = np.dtype(memory)
        self.data = np.dtype(data or memory)


I1 = Kind("int1", 1, np.bool_)
I8, I16, I32, I64 = (Kind(f"int{n}", n, f"int{n}") for n in (8, 16, 32, 64))
F16 = Kind("fp16", 16, np.float16, np.float32, True)
BF16 = Kind("bf16", 16, np.uint16, np.float32, True)
F32 = Kind("fp32", 32, np.float32, is_float=True)
F64 = Kind("fp64", 64, np.float64, is_float=True)
KINDS = {kind.name: kind for kind in (I1, I8, I16, I32, I64, F16, BF16, F32, F64)}
KINDS |= {f"u{kind.name}": kind for kind in (I8, I16, I32, I64)}


@functools.cache
def pointer_to(element: Kind) -> Kind:
    return Kind(f"*{element.name}", 64, np.int64, element=element)


class Value:
    """An intermediate result: `data` is a scalar or has len(shape) axes, each full or of extent 1.

    A pointer knows the argument it was computed from: `region`.
    """

    __slots__ = ("data", "kind", "region", "shape")

    def __init__(self, data, kind: Kind, shape=(), region=None):
        self.data, self.kind, self.shape, self.region = data, kind, shape, region

    def full(self) -> np.ndarray:
        """The data with all repetitions."""
        data = self.data
        return data if data.shape == self.shape else np.broadcast_to(data, self.shape)


# ---- rounding ----


def round_bf16(x):
    """fp32 numbers to the nearest bf16, ties to even, held in fp32; NaN stays NaN."""
    bits = x.view(np.uint32)
    bits = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & _HIGH_HALF
    rounded = bits.view(np.float32)
    nan = np.isnan(x)
    return np.where(nan, _NAN, rounded) if nan.any() else rounded


def round_f16(x):
    return x.astype(np.float16).astype(np.float32)


def round_tf32(x):
    """To the nearest tf32 (10 bits of fraction), ties away from zero: cvt.rna.tf32.f32."""
    finite = np.isfinite(x)
    bits = (x.view(np.uint32) + np.uint32(0x1000)) & _TF32_BITS
    return np.where(finite, bits.view(np.float32), x)


def truncate_tf32(x):
    """What a tensor core reads of an fp32 number."""
    bits = (x.view(np.uint32) & _TF32_BITS).view(np.float32)
    return np.where(np.isnan(x), x, bits)


_HIGH_HALF, _TF32_BITS = np.uint32(0xFFFF0000), np.uint32(0xFFFFE000)
_NAN = np.float32(np.nan)
_ROUND = {BF16: round_bf16, F16: round_f16}


def rounded(data, kind: Kind):
    """The result of an fp32 (fp64) computation as a number of `kind`."""
    round_to = _ROUND.get(kind)
    return data if round_to is None else round_to(data)


def from_memory(raw, kind: Kind):
    if kind is BF16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(kind.data, copy=False)


def to_memory(data, kind: Kind):
    if kind is BF16:
        return (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return data.astype(kind.memory, copy=False)


def unsigned(data):
    return data.view(_UNSIGNED[data.dtype])


_UNSIGNED = {np.dtype(f"int{n}"): np.dtype(f"uint{n}") for n in (8, 16, 32, 64)}
_UNSIGNED[np.dtype(bool)] = np.dtype(bool)


def constant(number, kind: Kind) -> Value:
    """A Python number as a scalar; unsigned ones keep their bits."""
    if kind.is_float:
        return Value(rounded(kind.data.type(number), kind), kind)
    if kind is I1:
        return Value(np.bool_(number), kind)
    number = int(number) & ((1 << kind.bits) - 1)
    return Value(_UNSIGNED[kind.data].type(number).view(kind.data), kind)


# ---- operations: create_<name> of the builder ----


def _float(ufunc):
    return lambda self, a, b: Value(rounded(ufunc(a.data, b.data), a.kind), a.kind, a.shape)


def _signed(ufunc):
    return lambda self, a, b: Value(ufunc(a.data, b.data), a.kind, a.shape)


def _unsigned(ufunc):
    def operation(self, a, b):
        data = ufunc(unsigned(a.data), unsigned(b.data))
        return Value(data.view(a.kind.data), a.kind, a.shape)

    return operation


def _compare(ufunc, read=lambda data: data):
    return lambda self, a, b: Value(ufunc(read(a.data), read(b.data)), I1, a.shape)


def _function(compute):
    """An elementary function; Triton allows only fp32 and fp64 for most."""
    return lambda self, a: Value(rounded(compute(a.data), a.kind), a.kind, a.shape)


def _divide(a, b):
    """Integer division that rounds to zero, as C's does."""
    return (a - np.fmod(a, b)) // b


def _exactly(compute):
    """A function of fp32 numbers by way of fp64: numpy's own fp32 ones differ from CPU to CPU."""
    return lambda *values: compute(*(v.astype(np.float64) for v in values)).astype(values[0].dtype)


_exp2 = _exactly(np.exp2)


def _of_torch(compute):
    return _exactly(lambda x: compute(torch.as_tensor(x)).numpy()[()])


def _exp(x):
    return _exp2(x * np.float32(1.4426950408889634)) if x.dtype == np.float32 else np.exp(x)


def _clamp(x, low, high):
    return np.fmin(np.fmax(x, low), high)


def _high_product(a, b):
    """The upper half of an unsigned product."""
    if a.dtype == np.uint32:
        return ((a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    return a1 * b1 + (middle >> half) + (((middle & low) + a0 * b1) >> half)


_ORDERED = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_FUNCTIONS = {
    "exp": _exp,
    "exp2": _exp2,
    "log": _exactly(np.log),
    "log2": _exactly(np.log2),
    "sqrt": np.sqrt,
    "precise_sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "sin": _exactly(np.sin),
    "cos": _exactly(np.cos),
    "erf": _of_torch(torch.special.erf),
    "floor": np.floor,
    "ceil": np.ceil,
    "fabs": np.abs,
    "iabs": np.abs,
}
# libdevice symbols without "__nv_" and the final f of the fp32 ones
_LIBDEVICE = _FUNCTIONS | {
    "exp": _exactly(np.exp),
    "tanh": _exactly(np.tanh),
    "log1p": _exactly(np.log1p),
    "expm1": _exactly(np.expm1),
    "pow": _exactly(np.power),
    "fast_exp": _exp,
    "trunc": np.trunc,
    "rint": np.rint,
    "erfc": _of_torch(torch.special.erfc),
}


class Operations:
    """The part of Triton's builder that computes; the methods have the builder's names."""

    create_fadd, create_fsub = _float(np.add), _float(np.subtract)
    create_fmul, create_frem = _float(np.multiply), _float(np.fmod)
    create_fdiv = create_precise_divf = _float(np.divide)
    create_minimumf, create_maximumf = _float(np.minimum), _float(np.maximum)
    create_minnumf, create_maxnumf = _float(np.fmin), _float(np.fmax)
    create_add, create_sub, create_mul = _signed(np.add), _signed(np.subtract), _signed(np.multiply)
    create_and, create_or = _signed(np.bitwise_and), _signed(np.bitwise_or)
    create_xor = _signed(np.bitwise_xor)
    create_shl, create_ashr = _signed(np.left_shift), _signed(np.right_shift)
    create_lshr = _unsigned(np.right_shift)
    create_sdiv, create_srem = _signed(_divide), _signed(np.fmod)
    create_udiv, create_urem = _unsigned(np.floor_divide), _unsigned(np.remainder)
    create_minsi, create_maxsi = _signed(np.minimum), _signed(np.maximum)
    create_minui, create_maxui = _unsigned(np.minimum), _unsigned(np.maximum)
    create_umulhi = _unsigned(_high_product)
    create_icmpEQ, create_icmpNE = _compare(np.equal), _compare(np.not_equal)
    create_fcmpOEQ, create_fcmpUNE = create_icmpEQ, create_icmpNE
    for _name, _ufunc in _ORDERED.items():
        locals()[f"create_fcmpO{_name}"] = locals()[f"create_icmpS{_name}"] = _compare(_ufunc)
        locals()[f"create_icmpU{_name}"] = _compare(_ufunc, unsigned)
    for _name, _compute in _FUNCTIONS.items():
        locals()[f"create_{_name}"] = _function(_compute)

    def create_fma(self, a, b, c):
        exact = a.data.astype(np.float64) * b.data + c.data
        return Value(rounded(exact.astype(a.kind.data), a.kind), a.kind, a.shape)

    def create_clampf(self, x, low, high, propagate_nan):
        data = _clamp(x.data, low.data, high.data)
        if propagate_nan == ir.PROPAGATE_NAN.ALL:
            data = np.where(np.isnan(x.data), x.data, data)
        return Value(data, x.kind, x.shape)

    def create_select(self, condition, a, b):
        region = a.region if a.region is b.region else None
        return Value(np.where(condition.data, a.data, b.data), a.kind, a.shape, region)

    def create_extern_elementwise(self, library, path, symbol, values, returns, is_pure):
        name = symbol.removeprefix("__nv_")
        name = name.removesuffix("f") if values[0].kind is F32 else name
        if name not in _LIBDEVICE:
            raise NotImplementedError(f"the interpreter has no libdevice function {symbol}")
        data = _LIBDEVICE[name](*(value.data for value in values))
        return Value(data, values[0].kind, values[0].shape)

    # ---- conversions ----

    def convert(self, value: Value, kind: Kind, signed: bool) -> Value:
        """A number as another kind; `signed` says how to read an integer source or result."""
        data, source = value.data, value.kind
        if source.is_float and kind.is_float:
            data = rounded(data.astype(kind.data, copy=False), kind)
        elif source.is_float:
            data = _to_integer(data, kind, signed)
        else:
            data = data if signed else unsigned(data)
            data = data.astype(kind.data)
            data = rounded(data, kind) if kind.is_float else data
        return Value(data, kind, value.shape)

    def create_fp_to_fp(self, value, to, rounding):
        """Rounding towards zero, the only other mode: one step back where the nearest is larger."""
        kind = element(to)
        nearest = rounded(value.data.astype(np.float32), kind)
        if kind is F16:
            back = np.nextafter(nearest.astype(np.float16), np.float16(0)).astype(np.float32)
        else:
            back = (nearest.view(np.uint32) - np.uint32(0x10000)).view(np.float32)
        over = np.abs(nearest) > np.abs(value.data)
        return Value(np.where(over, back, nearest), kind, value.shape)

    def create_bitcast(self, value, to):
        kind = element(to)
        if kind.element or value.kind.element:  # pointers
            return Value(value.data, kind, value.shape, value.region)
        raw = np.ascontiguousarray(to_memory(value.data, value.kind)).reshape(value.data.shape)
        return Value(from_memory(raw.view(kind.memory), kind), kind, value.shape)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # ---- matrix products ----

    def create_dot(self, a, b, c, precision, imprecise):
        left, right, start = a.full(), b.full(), c.full()
        if a.kind is I8:
            return Value(np.matmul(left, right, dtype=np.int32) + start, c.kind, c.shape)
        if a.kind is F64:
            return Value(np.matmul(left, right) + start, c.kind, c.shape)
        dot = fixed_order.accumulate
        if a.kind is not F32:
            data = dot(left, right, start, _TERMS_16_BIT)
        elif precision == ir.INPUT_PRECISION.IEEE:
            data = dot(left, right, start, 1)
        elif precision == ir.INPUT_PRECISION.TF32:
            data = dot(truncate_tf32(left), truncate_tf32(right), start, _TERMS_TF32)
        elif precision == ir.INPUT_PRECISION.TF32x3:
            big_a, big_b = round_tf32(left), round_tf32(right)
            small_a, small_b = truncate_tf32(left - big_a), truncate_tf32(right - big_b)
            small = dot(small_a, big_b, np.zeros_like(start), _TERMS_TF32)
            small = dot(big_a, small_b, small, _TERMS_TF32)
            small = np.where(np.isnan(small), np.float32(0), small)
            data = dot(big_a, big_b, small, _TERMS_TF32) + start
        else:
            raise NotImplementedError(f"the interpreter has no input_precision {precision}")
        return Value(rounded(data, c.kind), c.kind, c.shape)


# Products that a tensor core adds to its sum at once: Fasi et al., "Numerical behavior of NVIDIA
# tensor cores", 2021, for the A100. There the sum is cut, here it is rounded.
_TERMS_16_BIT, _TERMS_TF32 = 8, 4


def element(to) -> Kind:
    """The element kind of a builder's type: a kind, or (kind, shape) for blocks."""
    return to[0] if isinstance(to, tuple) else to


def _to_integer(data, kind: Kind, signed: bool):
    """Towards zero; out of range saturates and NaN gives 0, as cvt.rzi does."""
    bits = kind.bits - signed
    low, high = (-(2.0**bits) if signed else 0.0), 2.0**bits
    wide = np.trunc(np.nan_to_num(data.astype(np.float64), nan=0.0, posinf=high, neginf=low))
    target = kind.data if signed else _UNSIGNED[kind.data]
    limits = np.iinfo(target)
    inside = np.clip(wide, low, np.nextafter(high, 0)).astype(target)
    return np.where(wide >= high, limits.max, inside).astype(target).view(kind.data)
