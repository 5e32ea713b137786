"""load: a model from a checkpoint, in whichever of the known layouts it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import packed_file, positions
from .config import ViTConfig
from .model import ViT
from .precision import check_choice
from .weights import convert, layouts, source
from .weights.convert import Report
from .weights.layouts.base import Checkpoint, Layout, Refused

WHO = "vitkern.load"


@torch.inference_mode(False)  # whose tensors no engine packs: their changes cannot be seen
def load(
    path: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    interpolation: str = "bicubic",
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    strict: bool = True,
    base: str | os.PathLike[str] | None = None,
    **config: Any,
) -> Any:
    """A `vitkern.ViT` in eval mode with the weights of a file, a folder, a name or a state dict.

    The layout (timm's, torchvision's, Hugging Face's, JAX's .npz, ...) is found by the names of the
    tensors. A name is one of the Hugging Face Hub.

    classes: None keeps the head, 0 drops it, n puts a new one of zeros in its place (and keeps one
    that has n classes already).
    image_size: positions are moved to this size, by interpolation="bicubic" with antialiasing or by
    the paper's "bilinear".
    dtype: of the parameters; None is the checkpoint's own. precision: as `ViT.precision`.
    strict: an error lists what is missing, unexpected or of the wrong shape. With False the result
    is (model, report), and what is missing has initial values.
    base: the checkpoint that a LoRA adapter's folder belongs to, where it names another.
    config: fields of ViTConfig that the checkpoint does not tell (heads, activation, norm_eps).
    """
    check_choice(f"{WHO}: precision", precision)
    if interpolation not in positions.INTERPOLATIONS:
        known = " or ".join(positions.INTERPOLATIONS)
        raise ValueError(f"{WHO}: interpolation must be {known}, not {interpolation!r:.40}")
    if dtype is not None and dtype not in convert.DTYPES:
        raise ValueError(f"{WHO}: dtype must be a floating-point dtype, not {dtype!r:.40}")
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool)):
        raise TypeError(f"{WHO}: classes must be None or an integer, not {classes!r:.40}")
    for name in config.keys() - {f.name for f in dataclasses.fields(ViTConfig)}:
        ViTConfig().replace(**{name: None})  # says that there is no such field, and which is near
    c = source.find(path, base)
    if packed_file.is_packed(c.metadata):
        return _packed(c, {**config, "classes": classes, "image_size": image_size, "dtype": dtype},
                       precision, strict)  # fmt: skip
    layout, prefix = _layout_of(c)
    said = {**config, **({} if image_size is None else {"image_size": image_size})}
    bare = dataclasses.replace(layout.bare(c, prefix), said=said)
    own, headless = _configuration(layout, bare, classes, config)
    wanted = {
        name: tuple(t.shape)
        for name, t in ViT(own, device="meta").state_dict().items()
        if t.is_floating_point()  # BatchNorm's count of batches is none
    }
    state, report = convert.read(layout, bare, prefix, own, wanted, headless)
    if strict and not report.fits:
        raise ValueError(f"{WHO}: {c.path} does not fit: {report}")
    _check_finite(state, c.path)
    if image_size is not None:
        try:
            new = own.replace(image_size=image_size)
        except ValueError as error:
            raise ValueError(f"{WHO}: {error}") from error
        state, own = positions.moved(state, own, new, interpolation), new
    callers = c.tensors.values() if isinstance(path, Mapping) else ()
    shared = {tensor.untyped_storage().data_ptr() for tensor in callers}
    model = _built(own, state, dtype or _common_dtype(state), shared)
    if headless and classes:
        model.reset_classifier(classes)
    model.precision = precision
    model.eval()
    return model if strict else (model, report)


def _packed(c: Checkpoint, given: dict[str, Any], precision: str | None, strict: bool) -> Any:
    """A file that `save_packed` wrote holds a whole model, which is taken as it is."""
    asked = [name for name, value in given.items() if value is not None]
    if asked:
        _refuse(f"{c.path} is a packed model, whose {', '.join(asked)} cannot be chosen any more")
    model = packed_file.load_packed(c.path)
    if model.released is not None and precision not in (None, model.precision):
        _refuse(
            f"{c.path} is packed for {model.precision} and holds no weights for {precision}: leave"
            f" precision out, or load the checkpoint that it was made of"
        )
    model.precision = precision or model.precision
    return model if strict else (model, Report("vitkern's packed weights"))


def _layout_of(c: Checkpoint) -> tuple[Layout, str]:
    found = layouts.detect(c.tensors)
    if found is not None:
        return found
    layout, share = layouts.nearest(c.tensors)
    names = ", ".join(f"{name:.80}" for name in sorted(c.tensors)[: convert.SHOWN])
    like = f"nearest is {layout.title} ({share:.0%} of the names)" if share else "none is near"
    raise ValueError(
        f"{WHO}: {c.path} has no layout that is known: {like}; its {len(c.tensors)} tensors are"
        f" {names or 'none'}{', ...' if len(c.tensors) > convert.SHOWN else ''}"
    )


def _configuration(
    layout: Layout, c: Checkpoint, classes: int | None, changes: dict[str, Any]
) -> tuple[ViTConfig, bool]:
    """The configuration of the checkpoint, and whether its head is left out."""
    piece, head = layout.refusal(c), layout.head_refusal(c)
    if piece:
        _refuse(f"{c.path} is {layout.title}, and needs {piece}, which vitkern does not have yet")
    try:
        fields = c.own_fields() or layout.fields(c)
        keep = classes is None or (classes and classes == fields.get("classes") and not head)
        if keep and head:
            _refuse(
                f"{c.path} is {layout.title}, and needs {head}, which vitkern does not have yet;"
                f" classes=0 loads the model without it"
            )
        if not keep:
            two = fields.get("head") == "distilled"
            plain = {"classes": 0, "representation_size": None}
            fields |= plain | {"head": "distilled" if two else "linear"}
            if classes and fields.get("pool") == "none":
                fields["pool"] = "mean"
        found = ViTConfig().replace(**{**fields, **changes})
        if found.depth > len(c.tensors):
            raise ValueError(f"{len(c.tensors)} tensors are no {found.depth} blocks")
        return found, not keep
    except Refused as error:
        raise Refused(f"{WHO}: {c.path}: {error}".replace(f"{WHO}: {c.path}: {WHO}", WHO)) from None
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"{WHO}: {c.path} ({layout.title}): {error}") from error


def _refuse(message: str) -> NoReturn:
    raise Refused(f"{WHO}: {message}")


def _check_finite(state: Mapping[str, Tensor], path: str) -> None:
    """A ValueError for NaN and Inf: one pass over the weights, by a sum that either would spoil."""
    for name, tensor in state.items():
        if not tensor.sum(dtype=torch.float32 if tensor.itemsize < 8 else None).isfinite():
            odd = tensor.numel() - int(tensor.isfinite().sum())
            if odd:
                raise ValueError(f"{WHO}: {path}: {odd} of {tensor.numel()} elements of {name} are"
                                 f" NaN or Inf")  # fmt: skip


def _common_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    found = {tensor.dtype for tensor in state.values()}
    return found.pop() if len(found) == 1 else torch.float32


def _built(
    config: ViTConfig, state: Mapping[str, Tensor], dtype: torch.dtype, shared: set[int]
) -> ViT:
    """The model around the tensors, without a copy where they fit as they are.

    shared: memory that is not to become the model's: the caller's own.
    """
    model = ViT(config, device="meta")
    names = [name for name, _ in model.named_parameters()]
    initial = ViT(config, dtype=dtype).state_dict() if len(state) < len(names) else {}
    shared = set(shared)
    for name in names:
        value = state[name].detach().to(dtype).contiguous() if name in state else initial[name]
        place = value.data_ptr()
        if place in shared or value.untyped_storage().data_ptr() in shared:
            value = value.clone()
        shared.add(place)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(value))
    for name, buffer in list(model.named_buffers()):  # BatchNorm's, of a hybrid's stem
        owner, _, key = name.rpartition(".")
        kept = buffer.dtype if not buffer.is_floating_point() else dtype
        value = state.get(name, torch.zeros(buffer.shape)).detach().to(kept, copy=True)
        setattr(model.get_submodule(owner), key, value)
    return model


__all__ = ["Report", "load"]
