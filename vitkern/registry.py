"""The one table: what every operator means, costs and tolerates, and who implements it.

Dispatch, tests, benchmarks and docs read this table and nothing else, so an operator that is
registered is tested, benchmarked and documented. An `Operator` is what torch sees (schema, shapes,
implementations); an `OpSpec` is one *use* of it (`norm_linear`, `norm_linear+gelu`): a row of the
table.

Axis letters, the same in Python, Triton, C++ and docs:
  B batch, S tokens, D width, H heads, E head dim (D = H*E), F MLP width, P pixels per patch, M rows
  (B*S flattened), T prefix tokens, C Y X an image, py px a patch, K and N the inner and outer size
  of a GEMM.
An axis string is those letters with spaces: "B S 3 H E". "..." stands for any leading axes (M rows
in all); a letter with "?" may also be 1 (broadcast).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import SLACK, Slack

Axes = Mapping[str, int]
LARGEST = 2**63 - 1  # size of anything

# Ways to lay the same elements out in memory; every operator must accept all of them.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda t: t,
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],  # strided rows
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,  # strided columns
}


class CallShape(NamedTuple):
    """What a call needs to know besides its arguments: axis sizes, and its results to be."""

    sizes: dict[str, int]
    results: list[tuple[list[int], torch.dtype]]

    def allocate(self, like: Tensor) -> list[Tensor]:
        """New, contiguous results; what only a backward needs is empty unless it is saved."""
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in self.results]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute, however long the other axes are."""
        return all(0 in shape for shape, _ in self.results)


@dataclass(frozen=True)
class Operator:
    """An operator as torch knows it; implementations take the schema's arguments in order."""

    name: str
    schema: str  # arguments only: "Tensor x, Tensor? weight, float eps, bool save"
    axes: Mapping[str, str]  # tensor argument -> axis string
    # result -> (axis string, the argument whose dtype it has; "wide" is the first one's, at least
    # fp32)
    outputs: Mapping[str, tuple[str, str]]
    reference: Callable[..., tuple[Tensor, ...]]  # plain torch, any dtype: the definition
    backward: Callable[..., list[Tensor]]  # plain torch: gradients of `differentiable`
    differentiable: tuple[str, ...]
    native: str  # "module:function" on the CPU, imported on its first call
    derive: Callable[[dict[str, int]], dict[str, int]] = lambda sizes: {}  # axes from other axes
    integers: frozenset[str] = frozenset({"seed", "offsets"})  # tensors that need not be floats
    on_gpu: Callable[[dict[str, int]], bool] = lambda sizes: True  # whether the GPU kernels serve
    alike: tuple[str, ...] = ()  # arguments of one dtype
    passed: frozenset[str] = frozenset()  # arguments whose gradient is the result's, as it is

    @property
    def native_backward(self) -> str:
        """Its gradients on the CPU, "module:function"."""
        return f"vitkern.cpu_backward:{self.name}"

    @property
    def gpu(self) -> str:
        """The module of its Triton kernels, with a `forward` and a `backward`."""
        return f"vitkern.gpu.{self.name}"

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        return tuple(argument.split()[-1] for argument in self.schema.split(","))

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The tensors that may not be None."""
        kinds = (argument.split() for argument in self.schema.split(","))
        return tuple(name for kind, name in kinds if kind == "Tensor")

    def bind(self, values: Mapping[str, Any]) -> dict[str, int]:
        """The size of every axis letter, or a ValueError that says which tensor disagrees."""
        sizes: dict[str, int] = {}
        owner: dict[str, str] = {}
        for name in self.required:  # torch itself takes None for any tensor
            check_tensor(self.name, name, values[name])
        self._check_dtypes(values)
        tensors = {n: values[n] for n in self.axes if values.get(n) is not None}
        device = None
        for name, tensor in tensors.items():
            device = device or tensor.device
            if tensor.device != device:
                raise ValueError(
                    f"{self.name}: {name} is on {tensor.device}, the tensors before it on {device};"
                    f" move them to one device"
                )
            if not (tensor.is_floating_point() or name in self.integers):
                raise TypeError(
                    f"{self.name}: {name} is {tensor.dtype}, expected a floating-point tensor;"
                    f" convert it with {name}.float()"
                )
            letters, shape = self.axes[name].split(), tuple(tensor.shape)
            if letters[0] == "...":
                letters = letters[1:]
                if len(shape) >= len(letters):
                    sizes["M"] = math.prod(shape[: len(shape) - len(letters)])
                    shape = shape[len(shape) - len(letters) :]
            if len(shape) != len(letters):
                raise ValueError(self._complaint(name, tensor))
            for letter, size in zip(letters, shape, strict=True):
                if letter.endswith("?"):
                    letter = letter[:-1]
                    if size == 1 or letter not in sizes:
                        continue
                wanted = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
                if size != wanted:
                    whose = f" (from {owner[letter]})" if letter in owner else ""
                    raise ValueError(self._complaint(name, tensor, f"{letter}={wanted}{whose}"))
                owner.setdefault(letter, name)
        for letter, size in self.derive(sizes).items():
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{self.name}: {owner[letter]} has {letter}={sizes[letter]}, but the other"
                    f" arguments make {letter}={size}"
                )
        if sizes.get("M", 0) > LARGEST:  # of which each has no elements
            raise ValueError(f"{self.name}: {sizes['M']} rows are more than 64 bits can count")
        return sizes

    def _check_dtypes(self, values: Mapping[str, Any]) -> None:
        """16 and 32 bits mix (a wide residual stream, narrow weights), float64 with neither."""
        names = [n for n in self.differentiable if n not in self.integers]  # pixels are converted
        kinds = {n: values[n].dtype for n in names if values.get(n) is not None}
        if torch.float64 in kinds.values() and set(kinds.values()) != {torch.float64}:
            mixed = ", ".join(f"{n} {str(kind)[6:]}" for n, kind in kinds.items())
            raise TypeError(f"{self.name}: float64 does not mix with other dtypes, got {mixed}")
        for name in self.alike[1:]:
            if values[name].dtype != values[self.alike[0]].dtype:
                raise TypeError(
                    f"{self.name}: {self.alike[0]} is {values[self.alike[0]].dtype}, {name}"
                    f" {values[name].dtype}; use one dtype"
                )

    def _complaint(self, name: str, tensor: Tensor, detail: str = "") -> str:
        wanted = self.axes[name].replace(" ", ", ")
        return f"{self.name}: {name} has shape {tuple(tensor.shape)}, expected ({wanted})" + (
            f" with {detail}" if detail else ""
        )

    def output_shape(self, axes: str, sizes: Axes, leading: tuple[int, ...]) -> list[int]:
        shape: list[int] = []
        for letter in axes.split():
            if letter == "...":
                shape += leading
            else:
                shape.append(int(letter) if letter.isdigit() else sizes[letter])
        return shape

    def call_shape(self, values: Mapping[str, Any]) -> CallShape:
        """Checked sizes, and the shape and dtype of each result."""
        sizes = self.bind(values)
        first = values[next(iter(self.axes))]
        results = []
        for index, (axes, source) in enumerate(self.outputs.values()):
            wide = source == "wide"
            dtype = first.dtype if wide else values[source].dtype
            keep = index == 0 or (values["save"] and self.is_saved(index, values))
            shape = self.output_shape(axes, sizes, tuple(first.shape[:-1])) if keep else [0]
            results.append((shape, torch.promote_types(dtype, torch.float32) if wide else dtype))
        return CallShape(sizes, results)

    def is_saved(self, index: int, values: Mapping[str, Any]) -> bool:
        """Whether result `index` is kept for the backward: `pre` only before an activation."""
        return list(self.outputs)[index] != "pre" or values["activation"] != "none"


def check_tensor(op: str, name: str, value: object) -> None:
    """A clear error for what is no tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")


def _normal(shape: list[int], g: torch.Generator, axes: Axes) -> Tensor:
    # In float64, whose last bits no CPU's vector functions decide.
    return torch.randn(shape, generator=g, dtype=torch.float64).float()


def _weight(shape: list[int], g: torch.Generator, axes: Axes) -> Tensor:
    """As a trained layer's: results of the inputs' size, so that activations are not saturated."""
    return _normal(shape, g, axes) / max(1, math.prod(shape[1:])) ** 0.5


@dataclass(frozen=True)
class OpSpec:
    """One row of the table: a use of an operator with its cost, test cases and allowed error."""

    name: str
    op: Operator
    formula: str  # one line, printed in docs/ops.md
    inputs: tuple[str, ...]  # the tensor arguments this use passes
    flops: Callable[[Axes], int]  # useful flops only
    cases: tuple[Axes, ...]  # for tests: tiny, odd, prime, empty, real
    bench: tuple[Axes, ...]  # for benchmarks: shapes of real ViTs
    scalars: Mapping[str, Any] = field(default_factory=dict)
    makers: Mapping[str, Callable[[list[int], torch.Generator, Axes], Tensor]] = field(
        default_factory=dict
    )
    slack: Slack = SLACK

    def sizes(self, axes: Axes) -> dict[str, int]:
        """All letters of a case: the given ones and those that follow from them."""
        return {**axes, **self.op.derive(dict(axes))}

    def shape(self, name: str, axes: Axes) -> list[int]:
        letters = self.op.axes[name].replace("?", "")
        return self.op.output_shape(letters, self.sizes(axes), (axes.get("M", 0),))

    def make_inputs(
        self, axes: Axes, dtype: torch.dtype, layout: str = "packed", device: str = "cpu"
    ) -> dict[str, Tensor]:
        """Seeded inputs of a case; floats in `dtype`, integers (pixels, seeds, offsets) as are."""
        g = torch.Generator().manual_seed(0)
        made = {}
        for name in self.inputs:
            make = self.makers.get(name, _weight if name.endswith("weight") else _normal)
            t = make(self.shape(name, axes), g, self.sizes(axes))
            t = t.to(device, dtype) if t.is_floating_point() else t.to(device)
            made[name] = LAYOUTS[layout](t) if t.is_floating_point() else t
        return made

    def arguments(self, inputs: Mapping[str, Tensor], save: bool = False) -> list[object]:
        """The operator's whole argument list, in its schema's order; absent tensors are None."""
        given = {**self.scalars, "save": save, **inputs}
        return [given.get(name) for name in self.op.arguments]

    def bytes_moved(self, axes: Axes, itemsize: int) -> int:
        """Compulsory traffic: each input read once, the result written once."""
        sizes = self.sizes(axes)
        result = self.op.output_shape(
            next(iter(self.op.outputs.values()))[0], sizes, (axes.get("M", 0),)
        )
        return itemsize * sum(
            math.prod(s) for s in [*(self.shape(n, axes) for n in self.inputs), result]
        )

    def torch_op(self) -> Callable[..., tuple[Tensor, ...]]:
        return getattr(torch.ops.vitkern, self.op.name).default

    def load(self, backend: str) -> Callable[..., tuple[Tensor, ...]]:
        """The implementation by name: "reference", "native"."""
        if backend == "reference":
            return self.op.reference
        return resolve(getattr(self.op, backend))


REGISTRY: dict[str, OpSpec] = {}


def register(*specs: OpSpec) -> None:
    for spec in specs:
        if spec.name in REGISTRY:
            raise ValueError(f"operator {spec.name!r} is registered twice")
        REGISTRY[spec.name] = spec


def resolve(target: str) -> Callable:
    """Import "module:function"."""
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)
