"""The functions of triton.language as interpreted kernels call them.

Most are triton's own with their compiler argument filled in (`bound`); those that a compiler treats
in its own way (memory, loops, reductions) and some that are called often have versions here.
"""

from __future__ import annotations

import functools

import numpy as np
import triton.language as tl
from triton.language import core, standard

from .numerics import BF16, F16, I32, I64, Value
from .tensor import Tensor, block, builder, common_shape, scalar, semantic, spread, typed


def bound(function):
    """A built-in function of triton.language with its compiler argument filled in."""

    def call(*arguments, **named):
        named["_semantic"] = semantic
        return _own(function(*arguments, **named))

    return call


def _own(result):
    """What a built-in function returned, with our tensors and without constexpr."""
    kind = type(result)
    if kind is core.tensor:
        result.__class__ = Tensor
    elif kind is core.constexpr:
        return result.value
    elif kind is tuple or kind is core.tuple or kind is list:
        return tuple(_own(item) for item in result)
    return result


# ---- memory ----


def load(pointer, mask=None, other=None, boundary_check=(), padding_option="", **hints):
    if mask is None and other is not None:
        raise ValueError("tl.load: `other` cannot be provided without `mask`")
    dtype = _pointed_to("tl.load", pointer, boundary_check or padding_option)
    mask = _mask("tl.load", mask)
    other = None if other is None else semantic.cast(semantic.to_tensor(other), dtype)
    for given in (mask, other):
        if given is not None and given.handle.shape != pointer.handle.shape:
            if not pointer.handle.shape:
                raise ValueError(f"tl.load: a block of shape {given.handle.shape} for one pointer")
            pointer, _ = semantic.broadcast_impl_value(pointer, given)
    mask, other = (None if given is None else given.handle for given in (mask, other))
    loaded = builder.memory.load(pointer.handle, mask, other)
    return Tensor(loaded, typed(dtype, loaded.shape))


def store(pointer, value, mask=None, boundary_check=(), **hints):
    shape, dtype = pointer.handle.shape, _pointed_to("tl.store", pointer, boundary_check)
    value = semantic.cast(semantic.to_tensor(value), dtype)
    mask = _mask("tl.store", mask)
    for given in (value, mask):
        if given is not None and common_shape(given.handle.shape, shape) != shape:
            raise ValueError(f"tl.store: pointers of shape {shape} for {given.handle.shape}")
    mask = None if mask is None else spread(mask, shape).handle
    builder.memory.store(pointer.handle, spread(value, shape).handle, mask)


def _pointed_to(function, pointer, boundary):
    if not isinstance(pointer, Tensor) or pointer.handle.kind.element is None:
        raise ValueError(f"{function}: unsupported pointer {pointer!r}")
    dtype = pointer.dtype.element_ty
    if boundary or dtype.name == "int1":
        raise NotImplementedError(f"{function}: no block pointers and no int1 in the interpreter")
    return dtype


def _mask(function, mask):
    if mask is None:
        return None
    mask = semantic.to_tensor(mask)
    if mask.dtype.name != "int1":
        raise ValueError(f"{function}: the mask must be boolean, not {mask.dtype}")
    return mask


# ---- loops and control ----


def _range(start, stop=None, step=1, **hints):
    """The loop variable is a run-time integer, 32 bits unless a bound has 64."""
    if stop is None:
        start, stop = 0, start
    wide = any(isinstance(n, Tensor) and n.dtype.primitive_bitwidth == 64 for n in (start, stop))
    kind, dtype = (I64, tl.int64) if wide else (I32, tl.int32)
    for i in range(start, stop, step):
        yield Tensor(Value(kind.data.type(i), kind), dtype)


def _static_range(start, stop=None, step=1):
    return range(0, start, step) if stop is None else range(start, stop, step)


def _static_assert(condition, message=""):
    assert condition, message


def _truth(word, first, second):
    """`and`, `or` of a kernel: elementwise on tensors, Python's own on constants."""
    if not isinstance(first, Tensor):
        return (first and second()) if word == "and" else (first or second())
    second = second()
    if not isinstance(second, Tensor):
        second = scalar(bool(second), tl.int1)
    return (semantic.logical_and if word == "and" else semantic.logical_or)(first, second)


def _not(value):
    return semantic.not_(value) if isinstance(value, Tensor) else not value


def _choose(of_numbers, of_tensors):
    """min or max, as Python's built-in."""
    of_tensors = bound(of_tensors)

    def choose(*values):
        some = any(isinstance(value, Tensor) for value in values)
        return (of_tensors if some else of_numbers)(*values)

    return choose


def _same(value, *promises):
    return value


# ---- reductions ----

_REDUCERS = {  # combining functions whose reduction numpy has
    standard._sum_combine.fn: np.add,
    standard._elementwise_max.fn: np.fmax,
    standard._elementwise_min.fn: np.fmin,
}


def _along(values, index, axis):
    """values[index] along an axis."""
    at = (slice(None),) * axis + (index,)
    return [block(value.handle.full()[at], value) for value in values]


def _joined(combine, first, second):
    """The results of a combining function, as a list."""
    results = combine(*first, *second)
    return [results] if isinstance(results, Tensor) else list(results)


def reduce(values, axis, combine, keep_dims=False):
    """Whole halves of the block at a time; numpy's reduction where no step rounds."""
    if isinstance(values, Tensor):
        return reduce((values,), axis, combine, keep_dims)[0]
    rank = len(values[0].handle.shape)
    at = 0 if axis is None else axis % rank
    if axis is None:
        values = [block(value.handle.full().reshape(-1), value) for value in values]
    reducer, kind = _REDUCERS.get(combine.function), values[0].handle.kind
    if reducer is not None and not (reducer is np.add and kind in (F16, BF16)):
        data = values[0].handle.full()
        if reducer is np.add and at is not None:  # along the last axis numpy adds pairwise, as the
            data, at = np.ascontiguousarray(np.moveaxis(data, at, -1)), -1  # lanes of a warp do
        data = reducer.reduce(data, axis=at, dtype=kind.data)
        results = [block(data, values[0])]
    else:
        count = values[0].handle.shape[at]
        while count > 1:
            count //= 2
            upper = _along(values, slice(count, None), at)
            values = _joined(combine, _along(values, slice(count), at), upper)
        results = _along(values, 0, at)
    for _ in range((rank if axis is None else 1) if keep_dims else 0):
        results = [semantic.expand_dims(result, at) for result in results]
    return tuple(results)


def _reduce_with_indices(value, axis, combine, keep_dims=False):
    shape = value.handle.shape
    axis = axis % len(shape)
    along = [1] * len(shape)
    along[axis] = shape[axis]
    index = np.arange(shape[axis], dtype=np.int32).reshape(along)
    index = Tensor(Value(index, I32, shape), typed(tl.int32, shape))
    return reduce((value, index), axis, combine, keep_dims)


def scan(values, axis, combine, reverse=False):
    """One step after the other along the axis."""
    if isinstance(values, Tensor):
        return scan((values,), axis, combine, reverse)[0]
    axis = axis % len(values[0].handle.shape)
    count = values[0].handle.shape[axis]
    steps = [_along(values, i, axis) for i in range(count)]
    for i in range(count - 2, -1, -1) if reverse else range(1, count):
        steps[i] = _joined(combine, steps[i + 1 if reverse else i - 1], steps[i])
    columns = ([part.handle.full() for part in column] for column in zip(*steps, strict=True))
    return tuple(block(np.stack(c, axis), v) for c, v in zip(columns, values, strict=True))


# ---- elementary functions, often used: without the detour through triton's checks ----


def _elementary(name):
    compute = getattr(builder, f"create_{name}")

    def function(x):
        x = semantic.to_tensor(x)
        if x.dtype.name not in ("fp32", "fp64"):
            raise ValueError(f"Expected dtype ['fp32', 'fp64'] but got {x.dtype}")
        return Tensor(compute(x.handle), x.type)

    return function


def _umulhi(x, y):
    x, y = semantic.binary_op_type_checking_impl(x, y)
    return Tensor(builder.create_umulhi(x.handle, y.handle), x.type)


@functools.cache
def _arange(start, end):
    return semantic.arange(start, end)


def _full(shape, value, dtype):
    shape = tuple(int(n) for n in shape)
    value = value if isinstance(value, Tensor) else scalar(value, dtype)
    return spread(semantic.cast(value, dtype), shape)


_dots: dict[tuple, tuple] = {}  # combinations of types and shapes -> result type, precision


def _dot(a, b, acc=None, input_precision=None, allow_tf32=None, out_dtype=tl.float32, **hints):
    """triton.language.dot; it checks each combination of types and shapes once."""
    key = (a.type.name, b.type.name, acc is not None and acc.type.name, input_precision)
    key = (*key, out_dtype.name, builder.smallest_k)
    if key not in _dots or allow_tf32 is not None or len(a.handle.shape) > 3:
        result = bound(tl.dot)(a, b, acc, input_precision, allow_tf32, None, out_dtype)
        chosen = input_precision or builder.options.default_dot_input_precision
        _dots[key] = result.type, semantic._str_to_dot_input_precision(chosen)
        return result
    result, precision = _dots[key]
    if acc is None:
        acc = spread(scalar(0, result.scalar), tuple(result.shape))
    return Tensor(builder.create_dot(a.handle, b.handle, acc.handle, precision, 0), result)


ELEMENTARY = {n: _elementary(n) for n in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf")}
REPLACED = {
    tl.load: load,
    tl.store: store,
    tl.range: _range,
    tl.static_range: _static_range,
    tl.static_assert: _static_assert,
    tl.static_print: print,
    tl.constexpr: _same,
    tl.multiple_of: _same,
    tl.max_contiguous: _same,
    tl.max_constancy: _same,
    tl.reduce: reduce,
    tl.associative_scan: scan,
    core._reduce_with_indices: _reduce_with_indices,
    tl.umulhi: _umulhi,
    tl.arange: _arange,
    tl.full: _full,
    tl.dot: _dot,
    **{getattr(tl.math, name): function for name, function in ELEMENTARY.items()},
}
BUILTINS = {
    "range": _range,
    "min": _choose(min, core.builtin_min),
    "max": _choose(max, core.builtin_max),
    "_truth": _truth,
    "_not": _not,
}
