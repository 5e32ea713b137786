"""The interpreter's tensors: Triton's typing rules (triton.language.semantic) over numpy values.

Promotion, broadcasting and their errors are Triton's own code, with the rules that every operation
passes through written again for speed. The builder, which in a compiler emits instructions, does
them at once.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic

from .numerics import I1, I32, KINDS, Operations, Value, constant, element, pointer_to


class Options:
    """What triton's rules ask about the target."""

    debug = True  # device_assert is checked
    sanitize_overflow = False  # integers wrap
    supported_fp8_dtypes = deprecated_fp8_dot_operand_dtypes = ()
    default_dot_input_precision = "tf32"
    allowed_dot_input_precisions = ("tf32", "tf32x3", "ieee")
    max_num_imprecise_acc_default = 0


class Builder(Operations):
    """Triton's builder; `memory`, `grid` and `program` are those of the run in progress."""

    options = Options()

    def __init__(self) -> None:
        self.memory = None
        self.grid = self.program = (0, 0, 0)
        self.smallest_k = 16  # of a dot: a tensor core's step
        self.codegen_fns = {"min_dot_size": lambda lhs, rhs: (1, 1, self.smallest_k)}

    def __getattr__(self, name):
        raise NotImplementedError(f"the interpreter does not model {name.removeprefix('create_')}")

    # ---- types and constants ----

    def get_ptr_ty(self, kind, space):
        return pointer_to(kind)

    def get_block_ty(self, kind, shape):
        return (kind, tuple(shape))

    def get_null_value(self, to):
        return constant(0, element(to))

    def get_all_ones_value(self, to):
        return constant(-1, element(to))

    # ---- programs and memory ----

    def create_get_program_id(self, axis):
        return Value(np.int32(self.program[axis]), I32)

    def create_get_num_programs(self, axis):
        return Value(np.int32(self.grid[axis]), I32)

    def create_int_cast(self, value, to, signed):
        return self.convert(value, element(to), signed)

    def create_addptr(self, pointer, offset):
        data = pointer.data + offset.data.astype(np.int64) * pointer.kind.element.memory.itemsize
        return Value(data, pointer.kind, pointer.shape, pointer.region)

    def create_atomic_rmw(self, operation, pointer, value, mask, order, scope):
        return self.memory.atomic(operation.name, pointer, value, mask)

    def create_barrier(self):
        return None

    def create_assert(self, condition, message):
        if not np.all(condition.data):
            raise AssertionError(f"device_assert: {message}")

    def create_assume(self, condition):
        if not np.all(condition.data):
            raise AssertionError("tl.assume: the condition does not hold")

    def create_print(self, prefix, hexadecimal, values, signed):
        print(self.program, prefix, *(value.full() for value in values))

    # ---- shapes ----

    def create_make_range(self, to, start, stop):
        return Value(np.arange(start, stop, dtype=np.int32), I32, (stop - start,))

    def create_splat(self, to, value):
        return Value(value.data, value.kind, to[1], value.region)

    def create_unsplat(self, value):
        return Value(value.data.reshape(()), value.kind, (), value.region)

    def create_broadcast(self, value, shape):
        return Value(value.data, value.kind, tuple(shape), value.region)

    def create_expand_dims(self, value, axis):
        shape, data = value.shape, value.data
        if data.ndim:
            data = data.reshape((*data.shape[:axis], 1, *data.shape[axis:]))
        return Value(data, value.kind, (*shape[:axis], 1, *shape[axis:]), value.region)

    def create_reshape(self, value, shape, reorder):
        data = value.full().reshape(shape) if value.data.ndim else value.data
        return Value(data, value.kind, tuple(shape), value.region)

    def create_trans(self, value, order):
        order = [int(axis) for axis in order]
        data = value.data.transpose(order) if value.data.ndim else value.data
        return Value(data, value.kind, tuple(value.shape[i] for i in order), value.region)

    def create_join(self, a, b):
        return Value(np.stack([a.full(), b.full()], axis=-1), a.kind, (*a.shape, 2))

    def create_split(self, value):
        parts = value.full()
        return tuple(Value(parts[..., i], value.kind, value.shape[:-1]) for i in (0, 1))

    def create_cat(self, a, b):
        data = np.concatenate([a.full(), b.full()])
        return Value(data, a.kind, data.shape)

    def create_gather(self, source, index, axis):
        data = np.take_along_axis(source.full(), index.full().astype(np.int64), axis)
        return Value(data, source.kind, data.shape)


_TYPE_NAMES = {"fp16": "half", "fp32": "float", "fp64": "double"}
for _name, _kind in KINDS.items():
    setattr(Builder, f"get_{_TYPE_NAMES.get(_name, _name)}_ty", lambda self, kind=_kind: kind)
    setattr(Builder, f"get_{_name}", lambda self, number, kind=_kind: constant(number, kind))


class Size(int):
    """An extent: a plain number to kernels, while triton's functions ask for its `value`."""

    @property
    def value(self):
        return int(self)


class Tensor(core.tensor):
    """A tensor of an interpreted kernel; language.py gives it triton's methods."""

    def __init__(self, handle: Value, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar

    @property
    def shape(self):
        return [Size(n) for n in self.handle.shape]

    @property
    def numel(self):
        return Size(math.prod(self.handle.shape))

    def __bool__(self):
        if self.handle.shape:
            raise TypeError("a block has no truth value: use &, | or tl.where")
        return bool(self.handle.data)

    def __index__(self):
        if self.handle.shape:
            raise TypeError("a block is not an index")
        return int(self.handle.data)

    def __getitem__(self, index):
        """New axes: x[:, None]."""
        result = self
        for axis, at in enumerate(index if isinstance(index, tuple) else (index,)):
            if at is None:
                result = semantic.expand_dims(result, axis)
            elif at != slice(None):
                raise ValueError(f"unsupported tensor index: {at}")
        return result

    def __neg__(self):
        return semantic.minus(self)

    def __repr__(self):
        return f"{self.dtype}{list(self.handle.shape)}:\n{self.handle.full()}"

    __str__ = __repr__
    __hash__ = object.__hash__


_types: dict[tuple[str, tuple[int, ...]], core.dtype] = {}


def typed(dtype, shape: tuple[int, ...]):
    """The type of a tensor, made once: triton's are slow to make."""
    if not shape:
        return dtype
    found = _types.get((dtype.name, shape))
    if found is None:
        found = _types[dtype.name, shape] = tl.block_type(dtype, list(shape))
    return found


def scalar(number, dtype) -> Tensor:
    return Tensor(constant(number, KINDS[dtype.name]), dtype)


def pointer(address: int, dtype, region=None) -> Tensor:
    kind = pointer_to(KINDS[dtype.name])
    return Tensor(Value(np.int64(address), kind, (), region), tl.pointer_type(dtype))


def block(data: np.ndarray, like: Tensor) -> Tensor:
    """Data of the element type of `like` as a tensor."""
    value = Value(data, like.handle.kind, data.shape)
    return Tensor(value, typed(like.dtype, data.shape))


def spread(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor repeated to a larger shape; its data stay, but for leading axes."""
    handle = value.handle
    if handle.shape == shape:
        return value
    data = handle.data
    if data.ndim and data.ndim < len(shape):
        data = data.reshape((1,) * (len(shape) - data.ndim) + data.shape)
    return Tensor(Value(data, handle.kind, shape, handle.region), typed(value.dtype, shape))


@functools.cache
def common_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    long_a, long_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(m != n and m != 1 and n != 1 for m, n in zip(long_a, long_b, strict=True)):
        raise ValueError(f"shapes {a} and {b} do not broadcast")
    return tuple(map(max, long_a, long_b))


_NUMBERS = set(KINDS) - {"int1"}  # types whose arithmetic with a Python number stays in the type,
_DIVIDED = _NUMBERS - {"fp16", "bf16"}  # and whose division does
_INTEGERS = {name for name, kind in KINDS.items() if not kind.is_float}


def fits(number, dtype) -> bool:
    """Whether a Python number takes the tensor's type without a question."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    if dtype.name not in _INTEGERS:
        return True
    low, high = dtype.get_int_min_value(), dtype.get_int_max_value()
    return isinstance(number, int) and low <= number <= high


def takes(tensor: Tensor, other) -> bool:
    """Whether an operand can join the tensor as it is."""
    if isinstance(other, Tensor):
        return True
    return tensor.dtype.name in _DIVIDED and fits(other, tensor.dtype)


class Semantic(TritonSemantic):
    """Triton's typing rules."""

    tensor = Tensor

    def binary_op_type_checking_impl(
        self,
        lhs,
        rhs,
        allow_lhs_ptr=False,
        allow_rhs_ptr=False,
        arithmetic_check=True,
        div_or_mod=False,
    ):
        """Operands in one type and shape: the plain cases here, the others in triton."""
        kept = _DIVIDED if div_or_mod else _NUMBERS
        if isinstance(lhs, Tensor) and isinstance(rhs, Tensor):
            name = lhs.dtype.name
            if name == rhs.dtype.name and (name in kept or name == "int1"):
                return self.broadcast_impl_value(lhs, rhs)
            if allow_lhs_ptr and lhs.handle.kind.element and rhs.dtype.name in _INTEGERS:
                return self.broadcast_impl_value(lhs, rhs)
        elif isinstance(lhs, Tensor) and lhs.dtype.name in kept and fits(rhs, lhs.dtype):
            return lhs, _repeated(rhs, lhs)
        elif isinstance(rhs, Tensor) and rhs.dtype.name in kept and fits(lhs, rhs.dtype):
            return _repeated(lhs, rhs), rhs
        return super().binary_op_type_checking_impl(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def broadcast_impl_value(self, lhs, rhs):
        a, b = lhs.handle.shape, rhs.handle.shape
        if a == b:
            return lhs, rhs
        shape = common_shape(a, b)
        return spread(lhs, shape), spread(rhs, shape)

    def scalar_constant(self, value, dtype):
        return scalar(value, dtype)

    def splat(self, value, shape):
        return spread(value, tuple(shape))

    def expand_dims(self, value, axis):
        handle = builder.create_expand_dims(value.handle, axis)
        return Tensor(handle, typed(value.dtype, handle.shape))

    def _bool_like(self, value):
        return typed(tl.int1, value.handle.shape)

    def cast(self, value, to, fp_downcast_rounding=None):
        source, target = value.dtype, to.scalar
        if source.name == target.name:
            return value
        if fp_downcast_rounding is not None or not (source.name in KINDS and target.name in KINDS):
            return super().cast(value, to, fp_downcast_rounding)
        if target.name == "int1":
            handle = Value(value.handle.data != 0, I1, value.handle.shape)
        else:
            signed = (target if value.handle.kind.is_float else source).is_int_signed()
            handle = builder.convert(value.handle, KINDS[target.name], signed)
        return Tensor(handle, typed(target, handle.shape))


def _repeated(number, like: Tensor) -> Tensor:
    """A Python number in the type and shape of a tensor."""
    handle = like.handle
    return Tensor(Value(constant(number, handle.kind).data, handle.kind, handle.shape), like.type)


builder = Builder()
semantic = Semantic(builder)
