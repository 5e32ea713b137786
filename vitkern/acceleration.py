"""accelerate: a ready inference module from a model that exists, sharing its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .foreign import timm, torchvision, towers, transformers
from .model import ViT
from .precision import check_choice


def accelerate(model: nn.Module, precision: str | None = None, *, keep_weights: bool = True) -> Any:
    """An inference module with the parameters of `model`, a ViT of vitkern, timm, torchvision or
    transformers: a `vitkern.ViT` in eval mode for the first two.

    Of torchvision's and transformers' it is a copy of the model, class and names included, whose
    encoders run by a `vitkern.ViT` in eval mode without gradients. Where more is asked of one
    (hidden states, attention maps, a mask, another image size), the library's own code runs.

    The parameters are shared, not copied: what an optimizer does to `model` shows in the result,
    whose engine packs them again. precision: "fp32", "tf32", "bf16" or "int8", for the matmuls;
    None is the model's own dtype. A model that vitkern cannot express, or that has hooks or foreign
    modules, is refused.

    keep_weights=False: the result holds the only copy of the weights, packed for this precision
    (`ViT.release_weights`), and `model` itself is left without them, on the meta device. On a CPU.
    At bf16 and int8, which round, keep a checkpoint: the weights do not come back as they were.
    """
    check_choice("accelerate: precision", precision)
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: expected a ViT, got {type(model).__name__}")
    reader = torchvision.reader if torchvision.reader(model) else transformers.reader
    if reader is torchvision.reader or transformers.is_transformers(model):
        if not keep_weights:
            raise ValueError("accelerate: keep_weights=False is of vitkern's and timm's models")
        return towers.accelerated(model, reader, precision).eval()
    if isinstance(model, ViT):
        model.check_weights("accelerate")
    config = model.config if isinstance(model, ViT) else timm.config_of(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"accelerate: {name} is {parameter.dtype}, expected float32, bfloat16 or float16;"
                f" convert the model with .float() or .bfloat16()"
            )
    _check_untouched(model)
    fast = ViT(config, device="meta")
    theirs = timm.parameters_of(model)
    ours = dict(fast.named_parameters(remove_duplicate=False))
    odd = sorted(theirs.keys() ^ ours.keys())
    odd = odd or [n for n in ours if theirs[n].shape != ours[n].shape]
    if odd:
        raise ValueError(
            f"accelerate: the parameters are not those of a plain ViT: {', '.join(odd[:5])}"
            f"{' and more' if len(odd) > 5 else ''}; merge adapters first"
        )
    for name, parameter in theirs.items():
        owner, _, key = name.rpartition(".")
        setattr(fast.get_submodule(owner), key, parameter)
    buffers = dict(model.named_buffers())  # BatchNorm's statistics, of a hybrid's stem
    for name, _ in list(fast.named_buffers()):
        owner, _, key = name.rpartition(".")
        setattr(fast.get_submodule(owner), key, buffers[name])
    fast.precision = precision
    fast.pretrained_cfg = getattr(model, "pretrained_cfg", None)
    fast.eval()
    if not keep_weights:
        del theirs, ours, parameter  # would hold the memory
        fast.release_weights(model)
    return fast


def _check_untouched(model: nn.Module) -> None:
    if isinstance(model, ViT):
        structure = model.engines.structure()
        reason = structure.not_fused or structure.not_engine
        if reason:
            raise ValueError(f"accelerate: {reason}, and the result would not have it")
        return
    from .engines.structure import HOOKS

    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            raise ValueError(
                f"accelerate: {name or 'the model'}.forward was replaced, and the result would not"
                f" have it"
            )
        if any(getattr(module, hooks) for hooks in HOOKS):
            raise ValueError(
                f"accelerate: {name or 'the model'} has a hook, and the result would not have it;"
                f" remove it first"
            )
