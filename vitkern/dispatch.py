"""Which path a forward takes, and why: packed engine, fused operators, or module by module.

`choose` checks the image and returns the path, with the engine to call where it is that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch

from .config import ViTConfig
from .engines import Unpackable
from .precision import CHOICES, ON_CPU_ENGINE, PRECISIONS, fp32_as, name_of, torch_allows_tf32

if TYPE_CHECKING:
    from .engines.base import Engine
    from .engines.structure import Structure
    from .model import ViT

PATHS = ("auto", "engine", "fused", "reference")
_PLAIN = (Tensor, nn.Parameter)  # images of another class may compute in their own way
NOTHING_IN_THE_WAY = "eval mode, gradients off, nothing in the way"


@dataclass(slots=True)
class Route:
    """The path of a forward, why it is that one, and the engine that serves it, if one does."""

    path: str  # "engine", "fused", "reference"
    reason: str
    precision: str = ""  # of the engine
    engine: Engine | None = None
    structure: Structure | None = None  # what the modules were found to be, where it was decided


def choose(model: ViT, image: Tensor, want: str) -> Route:
    """The route of a call that wants "logits", "tokens", "blocks", "masked" or "mixed".

    "blocks" are intermediate results, "masked" those of masked attention; "mixed" is logits or
    tokens of images whose sizes may differ, of which this is one.
    """
    weight = model.patch_embed_weight
    asked = _asked(model, image, want, weight)
    precision = None if asked is None else _known(model, asked)
    if precision is not None:
        route = Route("engine", NOTHING_IN_THE_WAY, precision)
    else:
        check_image(model, image, weight)
        route = decide(model, image, want, weight)
    if route.path == "engine":
        try:
            route.engine = model.engines.ready(route.precision)
        except Unpackable as error:
            route = without_engine(model, str(error).removeprefix("ViT: "))
        else:
            if asked is not None and route.structure is not None:
                route.structure.remember(asked, route.precision)
    if route.engine is None and model.released is not None:
        model.check_weights(f"this call ({route.reason})")
    return route


def _asked(model: ViT, image: Tensor, want: str, weight: Tensor) -> tuple[object, ...] | None:
    """What `check_image` and `decide` read besides the modules: the same again, the same answer.

    None where torch is in a state, or the image of a kind, in which everything is looked at.
    """
    if torch.compiler.is_compiling() or type(image) not in _PLAIN:
        return None
    device = device_type(image)
    if _not_here(device):
        return None
    where: object = device
    if device != "cpu" or not weight.is_cpu:
        where = (image.device, weight.device, torch_allows_tf32())
    return (
        want, image.shape, image.dtype, image.layout, weight.dtype, where, model.training,
        model.path, model.precision, torch.is_grad_enabled(), forward_ad._current_level,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )  # fmt: skip


def _known(model: ViT, asked: tuple[object, ...]) -> str | None:
    """The precision of the engine that served such a call, if the modules are as they were."""
    try:
        return model.engines.known(asked)
    except ImportError:  # `decide` says which
        return None


def decide(model: ViT, image: Tensor | None, want: str, weight: Tensor) -> Route:
    """The same without an engine: whether the weights can be packed is not looked at.

    weight: the parameter whose dtype and device are the model's.
    """
    forced = model.path
    if model.precision in ON_CPU_ENGINE and forced in ("fused", "reference"):
        _refuse_precision(model, f'model.path is "{forced}"')
    if forced == "reference":
        return Route("reference", 'model.path is "reference"')
    if forced == "auto" and is_exporting():
        return Route("reference", "an export holds plain ATen operators, which every tool reads")
    compiling = torch.compiler.is_compiling()
    structure = None
    reason = _not_here(device_type(weight if image is None else image))
    if not reason and compiling:
        reason = _seen_while_compiling(model)
    if want == "masked":
        reason = reason or "attention is masked"
    elif not reason and not compiling:
        try:
            structure = model.engines.structure()
            reason = structure.not_fused or (structure.uneven_dropout if model.training else "")
        except ImportError as error:
            reason = f"the extension vitkern._C cannot be imported ({error})"
    if reason:
        if forced != "auto":
            raise RuntimeError(
                f"ViT: path {forced!r} is impossible: {reason}; set model.path = 'auto'"
            )
        if model.precision in ON_CPU_ENGINE:
            _refuse_precision(model, reason)
        return Route("reference", reason)
    if forced == "fused":
        return Route("fused", 'model.path is "fused"')
    if want == "mixed" and weight.is_cuda:
        reason = "the GPU engine takes images of one size, the fused operators of any"
    else:
        reason = _not_now(model, image) or (structure.not_engine if structure else "")
    precision = ""
    if not reason:
        precision = precision_of(model, weight)
        reason = "" if image is None else model.engines.why_not(image, precision)
    if reason:
        return without_engine(model, reason)
    return Route("engine", NOTHING_IN_THE_WAY, precision, structure=structure)


def _refuse_precision(model: ViT, reason: str) -> NoReturn:
    held = model.released
    first = "" if held is None else f"{held.how_to_restore()}; then "
    raise RuntimeError(
        f"ViT: precision {model.precision!r} is of the packed CPU engine only, which cannot serve"
        f" this call: {reason}. Or {first}set model.precision = None, or one of"
        f" {', '.join(CHOICES)}"
    )


def without_engine(model: ViT, reason: str) -> Route:
    """The route of a call that the engine cannot serve, for this reason."""
    if model.precision in ON_CPU_ENGINE:
        _refuse_precision(model, reason)
    if model.path == "engine":
        raise RuntimeError(f"ViT: path 'engine' is impossible: {reason}; set model.path = 'auto'")
    return Route("fused", reason)


def is_exporting() -> bool:
    """Whether torch.export is tracing, for itself or for torch.onnx."""
    known = getattr(torch.compiler, "is_exporting", None)  # torch >= 2.7
    return known is not None and known()


def _not_here(device: str) -> str:
    """Why the operators cannot stand in for modules now, whatever these are; "" if they can."""
    if device not in ("cpu", "cuda"):
        return f"there are no kernels for device {device}"
    if torch.jit.is_tracing():
        return "torch.jit is tracing"
    if torch.compiler.is_compiling():
        return ""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if _python_dispatch._len_torch_dispatch_stack():
        return "a torch dispatch mode (a FLOP counter, fake tensors) is active"
    if torch_module._has_any_global_hook():
        return "a global module hook is registered"
    return ""


def _seen_while_compiling(model: ViT) -> str:
    """What `Structure` finds, in terms the compiler can trace; a change makes it compile again."""
    from .engines.structure import lacks_parameter, uneven_dropout

    for name, module in model.named_modules():
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"{name} has a hook"
        if name and type(module) is not model.kinds.get(name):
            return f"{name} is a {type(module).__name__}, not vitkern's own module"
        if name and "forward" in module.__dict__:
            return f"{name}.forward was replaced"
        reason = lacks_parameter(name, module)
        if reason:
            return reason
        if model.training and uneven_dropout(module):
            return f"{name} has two dropout rates, the operator takes one"
    return ""


def _not_now(model: ViT, image: Tensor | None) -> str:
    """Why no engine can serve a call in this mode; "" if one can."""
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export is tracing"
    if model.training:
        return "the model is in training mode; call model.eval()"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are on"
    if torch.is_grad_enabled():
        return "gradients are enabled; use torch.inference_mode() or torch.no_grad()"
    if image is not None and type(image) not in _PLAIN:
        return f"the image is a {type(image).__name__}"
    return ""


# ---- precision ----


def compute_dtype(model: ViT, weight: Tensor | None = None) -> torch.dtype | None:
    """What matrices are cast to: autocast's dtype, `model.precision`'s, or None (as they are)."""
    weight = model.patch_embed_weight if weight is None else weight
    if model.precision in ON_CPU_ENGINE:
        return None
    if autocast(weight):
        dtype = torch.get_autocast_dtype(device_type(weight))
    elif model.precision is None:
        return None
    else:
        dtype = PRECISIONS[model.precision].dtype
    own = weight.dtype
    if {dtype, own} == {torch.float16, torch.bfloat16}:
        raise ValueError(
            f"ViT: a {str(own)[6:]} model cannot compute in {str(dtype)[6:]}: convert it"
            f" with .to({dtype}) or .float(), or turn autocast or model.precision off"
        )
    return None if own in (dtype, torch.float64) else dtype


def autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    device = device_type(tensor)
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def device_type(tensor: Tensor) -> str:
    """ "cpu", "cuda", ...: tensor.device.type in a quarter of its time where it is the CPU."""
    return "cpu" if tensor.is_cpu else tensor.device.type


def precision_of(model: ViT, weight: Tensor | None = None) -> str:
    """The precision of the next forward, by its name in precision.py."""
    weight = model.patch_embed_weight if weight is None else weight
    if model.precision in ON_CPU_ENGINE:
        return model.precision
    dtype, chosen = compute_dtype(model, weight) or weight.dtype, model.precision
    if chosen is not None and PRECISIONS[chosen].dtype == dtype:
        return chosen
    if weight.is_cuda and dtype == torch.float32 and torch_allows_tf32():
        return "tf32"  # as PyTorch would, and the fused operators do
    return name_of(dtype)


def at_precision(run: Callable[..., Any], model: ViT | None = None) -> Callable[..., Any]:
    """`run` whose operators multiply fp32 on a GPU as `model.precision` says, if it says that.

    model: None, and it is run's first argument. What torch.compile traces goes by torch's switches.
    """

    @functools.wraps(run)
    def called(*args: Any, **given: Any) -> Any:
        chosen = (args[0] if model is None else model).precision
        if torch.compiler.is_compiling() or chosen not in ("fp32", "tf32"):
            return run(*args, **given)
        with fp32_as(chosen == "tf32"):
            return run(*args, **given)

    return called


def check_releasable(model: ViT) -> str:
    """The precision to release a model's weights for, or a RuntimeError that says why not."""
    structure = model.engines.structure()
    precision = precision_of(model)
    reason = "the model is in training mode; call model.eval()" if model.training else ""
    if not reason and model.device.type != "cpu":
        reason = f"the model is on {model.device}, and only the CPU's engine holds its own weights"
    reason = reason or structure.not_fused or structure.not_engine
    if not reason and model.config.block == "parallel":
        reason = "a parallel block's projection is packed in parts"
    if not reason and precision in ON_CPU_ENGINE and shared_matrix(model):
        name = shared_matrix(model)
        reason = f"two layers share {name}, which {precision} rounds for each of them by itself"
    reason = reason or model.engines.why_not(model.patch_embed_weight, precision)
    reason = reason or model.engines.unpackable(precision)
    if reason:
        raise RuntimeError(f"ViT.release_weights: {reason}")
    return precision


def shared_matrix(model: ViT) -> str:
    """The second name of a block's matrix that two layers have; "" where none is shared."""
    seen: set[Tensor] = set()
    for name, parameter in model.blocks.named_parameters(remove_duplicate=False):
        if parameter.ndim == 2 and parameter in seen:
            return f"blocks.{name}"
        seen.add(parameter)
    return ""


# ---- images ----


def check_image(model: ViT, image: Tensor, weight: Tensor, name: str = "image") -> None:
    """Refuse an image, called `name`, that the model cannot take, and say what to do."""
    if not model.has_own_embedding:
        return  # a foreign module: it takes what it takes
    c = model.config
    if not isinstance(image, Tensor):
        raise TypeError(f"ViT: {name} must be a torch.Tensor, got {type(image).__name__}")
    if image.layout is not torch.strided:
        raise TypeError(f"ViT: {name} has layout {image.layout}; pass {name}.to_dense()")
    shape = tuple(image.shape)
    if len(shape) != 4:
        hint = "; add a batch axis with image[None]" if len(shape) == 3 else ""
        raise ValueError(f"ViT: image has shape {shape}, expected (B, C, Y, X){hint}")
    if shape[1] != c.channels:
        hint = ""
        if shape[3] == c.channels:
            hint = (
                "; it looks like (B, Y, X, C): pass image.permute(0, 3, 1, 2), which copies nothing"
            )
        raise ValueError(f"ViT: image has {shape[1]} channels, the model takes {c.channels}{hint}")
    _check_size(c, shape[2:], name)
    if image.dtype != weight.dtype:
        _check_dtype(c, image, weight, autocast(weight), name)
    if image.device != weight.device:
        raise ValueError(
            f"ViT: {name} is on {image.device}, the model on {weight.device};"
            f" move one of them with .to({str(weight.device)!r})"
        )


def _check_size(c: ViTConfig, size: tuple[int, int], name: str) -> None:
    if c.dynamic_image_size:
        if any(s < c.patch_pixels or (s % c.patch_pixels and not c.crop) for s in size):
            raise ValueError(
                f"ViT: {name} is {size[0]}x{size[1]} pixels, each side must be a multiple of the"
                f" patch size {c.patch_pixels}; resize or crop it"
            )
        return
    wanted = c.pixels
    if size != wanted:
        raise ValueError(
            f"ViT: {name} is {size[0]}x{size[1]} pixels, the model takes {wanted[0]}x{wanted[1]};"
            f" resize it, or call model.set_input_size({tuple(size)}), or build the model with"
            f" dynamic_image_size=True"
        )


def _check_dtype(c: ViTConfig, image: Tensor, weight: Tensor, autocast: bool, name: str) -> None:
    if image.dtype == torch.uint8:
        if c.mean is None:
            raise ValueError(
                "ViT: uint8 images need the pixel mean and std; build the model with them, such as"
                " mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), or pass normalised floats"
            )
        return
    if not image.is_floating_point():
        raise TypeError(f"ViT: {name} is {image.dtype}, expected {weight.dtype} or uint8")
    if not (autocast and image.dtype != torch.float64):
        raise TypeError(
            f"ViT: {name} is {image.dtype}, the model {weight.dtype};"
            f" convert it with {name}.to({weight.dtype})"
        )
