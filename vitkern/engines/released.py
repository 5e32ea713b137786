"""Weights that are held once, packed: what stands in the parameters' place, and the way back.

A model's matrices are packed one after the other, and each parameter is replaced by one on the meta
device, which has its shape and no memory, as soon as its panels exist. Vectors, positions and what
the engine does not pack stay as they are: they are less than a hundredth. At int8 the patch
embedding and the head, which are not rounded to integers, stay parameters, too.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _C, cpu, int8, packing
from ..panels import Form
from . import Unpackable

if TYPE_CHECKING:
    from ..model import ViT

_TRIM = 64 << 20  # bytes after whose release malloc is asked for what it holds free


class Released:
    """The panels of a model's matrices, by the parameter without memory that stands for each."""

    def __init__(self, precision: str, dtype: torch.dtype) -> None:
        self.precision = precision
        self.like = torch.empty(0, dtype=dtype)  # of the dtype and device that the model has
        self.panels: dict[nn.Parameter, _C.Packed] = {}
        self.integers: dict[nn.Parameter, int8.Held] = {}  # at int8, in place of `panels`
        self.exact = precision != "int8"  # they hold the parameters' values to the last bit

    def __bool__(self) -> bool:
        return bool(self.panels or self.integers)

    def holds(self, parameter: object) -> bool:
        known = isinstance(parameter, nn.Parameter)
        return known and (parameter in self.panels or parameter in self.integers)

    def panels_of(self, parameter: nn.Parameter, layout: int) -> _C.Packed:
        """For an engine; Unpackable where it reads other panels."""
        panels = self.panels.get(parameter)
        if panels is None:
            raise Unpackable(f"the weights were released as packed for {self.precision}")
        if panels.layout != layout:
            raise Unpackable(f"the weights were released as packed for {self.precision}")
        return panels

    def unpacked(self, parameter: nn.Parameter, rounded: bool = False) -> Tensor:
        """The values that a parameter had, or with `rounded` what packing left of them."""
        if not (self.exact or rounded):
            raise RuntimeError(self.why_not_exact())
        if parameter in self.integers:
            return self.integers[parameter].values().to(parameter.dtype)
        panels = self.panels[parameter]
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        if panels.unpack(packing.DTYPES[values.dtype], values.data_ptr()):
            return values
        words = (ctypes.c_int32 * (panels.bytes // 4)).from_address(panels.panels)
        form = Form(*_C.panel_form(panels.layout))
        found = form.unpacked(torch.frombuffer(words, dtype=torch.int32), *panels.shape)
        return found.view(parameter.shape).to(parameter.dtype)

    def how_to_restore(self) -> str:
        if self.exact:
            return "call model.restore_weights() first"
        return (
            "call model.restore_weights(state_dict) with the checkpoint's first, or"
            " model.restore_weights(rounded=True) for what packing left of them"
        )

    def why_not_exact(self) -> str:
        return (
            f"ViT: the weights were released as packed for {self.precision}, which rounded them:"
            " their values cannot be regained. Call model.restore_weights(state_dict) with those of"
            " the checkpoint, model.restore_weights(rounded=True) for what packing left of them, or"
            " model.save_packed(path) to keep the packed weights in a file"
        )

    def shared(self) -> Released:
        """For another model with the same parameters: restoring one leaves the other released."""
        other = copy.copy(self)
        other.panels, other.integers = dict(self.panels), dict(self.integers)
        return other

    def __copy__(self) -> Released:
        other = Released(self.precision, self.like.dtype)
        other.panels, other.integers, other.exact = self.panels, self.integers, self.exact
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Released:
        """Panels never change, so that a deep copy of a model shares them."""
        other = copy.copy(self)
        other.panels = {copy.deepcopy(p, memo): panels for p, panels in self.panels.items()}
        other.integers = {copy.deepcopy(p, memo): one for p, one in self.integers.items()}
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"ViT: weights that were released cannot be pickled; {self.how_to_restore()}, or write"
            " a file with model.save_packed(path)"
        )


def release(model: ViT, precision: str, *others: nn.Module) -> Released:
    """Pack the model's matrices one by one, each in its parameter's place, here and in `others`."""
    released = Released(precision, model.dtype)
    slots = _slots([model, *others])
    engines = model.engines
    there = engines.matrices(precision)
    engines.forget()
    since_trim = 0
    packed = _integers(model) if precision == "int8" else _panels(model, precision, there)
    for name, panels in packed:
        parameter = model.get_parameter(name)
        if released.holds(parameter):
            continue  # tied to one before
        empty = torch.empty_like(parameter, device="meta")
        placeholder = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        if isinstance(panels, int8.Held):
            released.integers[placeholder] = panels
        else:
            released.exact = released.exact and regains(panels, parameter)
            released.panels[placeholder] = panels
        for module, key in slots[id(parameter)]:
            setattr(module, key, placeholder)
        since_trim += parameter.nbytes
        del parameter
        if since_trim >= _TRIM:
            _C.arena_trim()
            since_trim = 0
    model.__dict__.pop(int8.RESTORED, None)
    _C.arena_trim()
    return released


def _panels(
    model: ViT, precision: str, there: dict[str, _C.Packed]
) -> Iterator[tuple[str, _C.Packed]]:
    """The panels of each matrix by its name: those that there are, or packed now."""
    from .cpu import matrix_names

    layout = _C.engine_layout("", cpu.PRECISIONS[precision])
    for name in matrix_names(model):
        parameter = model.get_parameter(name)
        if not parameter.is_meta:  # tied to one before
            found = there.pop(name, None)
            yield name, packing.shared(parameter, layout) if found is None else found


def _integers(model: ViT) -> Iterator[tuple[str, int8.Held]]:
    """The same at int8."""
    by = int8.smoothings(model, int8.held_by(model))
    for name, part in int8.parts_of(model):
        if isinstance(part, int8.Quantised):
            yield name, int8.Held(part, by.get(name))


def restore(
    model: ViT, released: Released, state: Mapping[str, Tensor] | None, rounded: bool
) -> None:
    """Give the parameters memory again, one by one, and values: the state's, or the panels'."""
    if state is None and not (released.exact or rounded):
        raise RuntimeError(released.why_not_exact())
    slots = _slots([model])
    names = {name: p for name, p in model.named_parameters() if released.holds(p)}
    if state is not None:
        _check_state(state, names)
    model.engines.forget()
    if state is None and released.integers:  # for int8 again, with the same bits
        setattr(model, int8.RESTORED, {name: released.integers[p] for name, p in names.items()})
    for name in list(names):
        placeholder = names.pop(name)
        if state is None:
            values = released.unpacked(placeholder, rounded)
        else:
            values = state[name].detach().to("cpu", placeholder.dtype, copy=True).contiguous()
        parameter = nn.Parameter(values, requires_grad=placeholder.requires_grad)
        for module, key in slots[id(placeholder)]:
            setattr(module, key, parameter)
        released.panels.pop(placeholder, None)
        released.integers.pop(placeholder, None)
    released.panels.clear()  # and those of parameters that were replaced meanwhile
    released.integers.clear()


def _check_state(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, parameter in wanted.items():
        given = state.get(name)
        if not isinstance(given, Tensor) or given.shape != parameter.shape:
            what = "is missing" if given is None else f"has shape {tuple(given.shape)}"
            raise ValueError(
                f"ViT.restore_weights: {name} {what} in the state dict, expected"
                f" {tuple(parameter.shape)}"
            )


def _slots(models: list[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is, by its id: the parameters themselves are not held."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for model in models:
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), []).append((module, key))
    return found


def regains(panels: _C.Packed, parameter: Tensor) -> bool:
    """Whether unpacking gives the parameter's bits."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype)
    if not panels.unpack(packing.DTYPES[values.dtype], values.data_ptr()):
        return False
    bits = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return torch.equal(values.view(bits), parameter.detach().contiguous().view(bits))
