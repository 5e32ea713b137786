"""Encoders inside foreign models, run by a ViT: the model around them stays what it is.

`accelerated` copies the modules and shares their parameters, so that names and configuration are
the model's own. An encoder's forward then runs in a ViT that reads the same parameters, where a
call is plain inference; every other call (gradients, training, hidden states, attention maps,
masks, other image sizes) is the library's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import ViTConfig
from ..engines.base import places
from ..model import ViT


class Reading(NamedTuple):
    """An encoder as a ViT: its configuration, where each parameter is, what follows its tokens."""

    config: ViTConfig
    parameters: dict[str, Tensor]  # by vitkern's names; a Parameter of the right shape is shared
    finish: Callable[[Any, Tensor], Any]  # (encoder, tokens (B, S, D)) to what its forward returns


def affine(name: str, module: Any) -> dict[str, Tensor]:
    """Weight and bias of a foreign norm or linear layer, by vitkern's name for it."""
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}


class Tower:
    """The forward of an encoder, by a ViT where that gives the same.

    read: an encoder's Reading, taken again whenever its parameters changed.
    """

    def __init__(
        self, encoder: nn.Module, read: Callable[[Any], Reading], precision: str | None
    ) -> None:
        self.encoder, self._read, self._precision = encoder, read, precision
        self._seen: tuple[Tensor, ...] = ()
        self._places: Any = None
        self.current()

    def current(self) -> ViT:
        """The ViT of the encoder's parameters as they are now."""
        now = tuple(self.encoder.parameters())
        same = len(now) == len(self._seen) and all(map(_is, now, self._seen))
        if not same or not self._places.match(now):
            self._finish, self.vit = _built(self._read(self.encoder), self._precision)
            self._seen, self._places = now, places(now)
        return self.vit

    def __call__(self, image: Any = None, *others: Any, **options: Any) -> Any:
        given = (
            options.pop("pixel_values") if image is None and "pixel_values" in options else image
        )
        if self._is_plain(given) and not others and not any(map(_asks, options.items())):
            vit = self.current()
            rows, columns = vit.patch_embed.img_size
            pixels = given.to(vit.dtype)[:, :, :rows, :columns]
            return self._finish(self.encoder, vit.forward_features(pixels))
        return type(self.encoder).forward(self.encoder, given, *others, **options)

    def _is_plain(self, image: Any) -> bool:
        """Whether the image, the state of torch and the modules leave the ViT no choice to miss."""
        if self.encoder.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if type(image) is not Tensor or image.ndim != 4 or torch.jit.is_tracing():
            return False
        c = getattr(self.encoder, "config", None)
        if (
            any(getattr(c, name, False) for name in _OUTPUTS)
            or getattr(c, "return_dict", True) is False
            or _size(self.encoder) != image.shape[2:]
        ):
            return False
        return not any(_is_listened_to(m) or _is_replaced(m) for m in self.encoder.modules())


_OUTPUTS = ("output_hidden_states", "output_attentions")


def _is(a: object, b: object) -> bool:
    return a is b


def _asks(option: tuple[str, Any]) -> bool:
    """Whether an argument changes the result."""
    name, value = option
    return value is False if name == "return_dict" else value is not None and value is not False


def _size(encoder: Any) -> tuple[int, int]:
    size = encoder.image_size if hasattr(encoder, "image_size") else encoder.config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _is_listened_to(module: nn.Module) -> bool:
    """Whether a module has hooks; transformers' own, which wait to be asked, do not count."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any("output_capturing" not in getattr(hook, "__module__", "") for hook in hooks)


def _is_replaced(module: nn.Module) -> bool:
    return "forward" in module.__dict__ and not isinstance(module.__dict__["forward"], Tower)


def _built(reading: Reading, precision: str | None) -> tuple[Callable[[Any, Tensor], Any], ViT]:
    vit = ViT(reading.config, device="meta")
    wanted = dict(vit.named_parameters())
    odd = sorted(wanted.keys() ^ reading.parameters.keys())
    odd = odd or [n for n, p in wanted.items() if p.shape != reading.parameters[n].shape]
    if odd:
        raise ValueError(
            f"accelerate: the encoder's parameters are not those of a plain ViT: {odd[:5]}"
        )
    for name, value in reading.parameters.items():
        owner, _, key = name.rpartition(".")
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach(), requires_grad=False)
        setattr(vit.get_submodule(owner), key, value)
    vit.precision = precision
    return reading.finish, vit.eval()


def accelerated(
    model: nn.Module, reader: Callable[[nn.Module], Callable[[Any], Reading] | None],
    precision: str | None,
) -> nn.Module:  # fmt: skip
    """A copy of the model whose encoders run in ViTs; reader: how a module is read, if it is one.

    A ValueError where no module is an encoder, or one has something that a ViT has not.
    """
    found = [(name, read) for name, m in model.named_modules() if (read := reader(m)) is not None]
    if not found:
        raise ValueError(f"accelerate: a {type(model).__name__} has no encoder that vitkern knows")
    for name, module in model.named_modules():
        if _is_replaced(module):
            raise ValueError(
                f"accelerate: {name or 'the model'}.forward was replaced, and the result would not"
                f" have it"
            )
    fast = _copied(model, {})
    for name, read in found:
        encoder = fast.get_submodule(name)
        encoder.forward = Tower(encoder, read, precision)
    return fast


def _copied(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """A module with the same parameters, and with children, hooks and mode of its own."""
    if id(module) not in made:
        new = made[id(module)] = copy.copy(module)
        for name, value in module.__dict__.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                new.__dict__[name] = value.copy()
        new._modules = {
            name: None if child is None else _copied(child, made)
            for name, child in module._modules.items()
        }
    return made[id(module)]
