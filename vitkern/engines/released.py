"""Weights that are held once, packed: what stands in the parameters' place, and the way back.

A model's matrices are packed one after the other, and each parameter is replaced by one on the meta
device, which has its shape and no memory, as soon as its panels exist. Vectors, positions and what
the engine does not pack stay as they are: they are less than a hundredth.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _C, cpu, packing
from . import Unpackable

if TYPE_CHECKING:
    from ..model import ViT

_TRIM = 64 << 20  # bytes after whose release malloc is asked for what it holds free
RESTORE = "call model.restore_weights() first"


class Released:
    """The panels of a model's matrices, by the parameter without memory that stands for each."""

    def __init__(self, precision: str, dtype: torch.dtype) -> None:
        self.precision = precision
        self.like = torch.empty(0, dtype=dtype)  # of the dtype and device that the model has
        self.panels: dict[nn.Parameter, _C.Packed] = {}
        self.exact = True  # the panels hold the parameters' values to the last bit

    def holds(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter) and parameter in self.panels

    def panels_of(self, parameter: nn.Parameter, layout: int) -> _C.Packed:
        """For an engine; Unpackable where it reads other panels."""
        panels = self.panels[parameter]
        if panels.layout != layout:
            raise Unpackable(f"the weights were released as packed for {self.precision}")
        return panels

    def unpacked(self, parameter: nn.Parameter) -> Tensor:
        """The values that a parameter had."""
        if not self.exact:
            raise RuntimeError(self.why_not_exact())
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.panels[parameter].unpack(packing.DTYPES[values.dtype], values.data_ptr())
        return values

    def why_not_exact(self) -> str:
        return (
            f"ViT: the weights were released as packed for {self.precision}, which rounded them:"
            " their values cannot be regained. Call model.restore_weights(state_dict) with those of"
            " the checkpoint"
        )

    def shared(self) -> Released:
        """For another model with the same parameters: restoring one leaves the other released."""
        other = copy.copy(self)
        other.panels = dict(self.panels)
        return other

    def __copy__(self) -> Released:
        other = Released(self.precision, self.like.dtype)
        other.panels, other.exact = self.panels, self.exact
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Released:
        """Panels never change, so that a deep copy of a model shares them."""
        other = copy.copy(self)
        other.panels = {copy.deepcopy(p, memo): panels for p, panels in self.panels.items()}
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"ViT: weights that were released cannot be pickled; {RESTORE}, or save"
            " model.state_dict()"
        )


def release(model: ViT, precision: str, *others: nn.Module) -> Released:
    """Pack the model's matrices one by one, each in its parameter's place, here and in `others`."""
    from .cpu import matrix_names

    layout = _C.engine_layout("", cpu.PRECISIONS[precision])
    engines = model.engines
    there = engines.matrices(precision)
    engines.forget()
    released = Released(precision, model.dtype)
    names = matrix_names(model)
    slots = _slots([model, *others])
    since_trim = 0
    for name in names:
        parameter = model.get_parameter(name)
        if released.holds(parameter):
            continue  # tied to one before
        panels = there.pop(name, None) or packing.shared(parameter, layout)
        released.exact = released.exact and regains(panels, parameter)
        empty = torch.empty_like(parameter, device="meta")
        placeholder = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        released.panels[placeholder] = panels
        for module, key in slots[id(parameter)]:
            setattr(module, key, placeholder)
        since_trim += parameter.nbytes
        del parameter
        if since_trim >= _TRIM:
            _C.arena_trim()
            since_trim = 0
    _C.arena_trim()
    return released


def restore(model: ViT, released: Released, state: Mapping[str, Tensor] | None) -> None:
    """Give the parameters memory again, one by one, and values: the state's, or the panels'."""
    if state is None and not released.exact:
        raise RuntimeError(released.why_not_exact())
    slots = _slots([model])
    names = {name: p for name, p in model.named_parameters() if released.holds(p)}
    if state is not None:
        _check_state(state, names)
    model.engines.forget()
    for name in list(names):
        placeholder = names.pop(name)
        if state is None:
            values = released.unpacked(placeholder)
        else:
            values = state[name].detach().to("cpu", placeholder.dtype, copy=True).contiguous()
        parameter = nn.Parameter(values, requires_grad=placeholder.requires_grad)
        for module, key in slots[id(placeholder)]:
            setattr(module, key, parameter)
        del released.panels[placeholder]
    released.panels.clear()  # and those of parameters that were replaced meanwhile


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
