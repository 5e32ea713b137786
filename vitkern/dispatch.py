"""Which path a forward takes, and why: packed engine, fused operators, or module by module.

The fused paths read parameters and skip the modules around them. That is only right while every
module is the one this package put there and nobody listens to it; `Watch` sees when that ends.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch

from .layers import Dropout, Mlp

PATHS = ("auto", "engine", "fused", "reference")
# What matrix products are computed in, most exact first, and the dtype their operands have.
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = frozenset({nn.Parameter, Tensor, type(None)})  # anything else computes in its own way
# What the operators read of a module; torch's own modules do without some of these.
_NEEDED = {nn.LayerNorm: ("weight", "bias"), nn.Linear: ("weight",), nn.Conv2d: ("weight",)}


class Watch:
    """Sees hooks, replaced modules and wrapped parameters below a model.

    It looks at every forward: 35 us for ViT-B's 251 modules, in C loops where Python has them.
    """

    def __init__(self, model: nn.Module, kinds: dict[str, type]) -> None:
        self.kinds = kinds
        self.slots: list[tuple[dict, str, nn.Module]] = []
        self.names: list[str] = []
        for name, module in model.named_modules():
            for key, child in module._modules.items():
                if child is not None:
                    self.slots.append((module._modules, key, child))
                    self.names.append(f"{name}.{key}" if name else key)
        self.types = [kinds.get(name) for name in self.names]
        self.children = [child for _, _, child in self.slots]
        self.hooks = [getattr(child, hook) for child in self.children for hook in HOOKS]
        self.own = [child.__dict__ for child in self.children]
        self.parameters = [child._parameters for child in self.children]
        named = list(zip(self.names, self.children, strict=True))
        self.norms = [(n, m) for n, m in named if type(m) is nn.LayerNorm and n != "head_norm"]
        self.needed = [
            (n, m._parameters, key)
            for n, m in named
            for key in (_NEEDED.get(type(m), ()) if n != "head_norm" else ())
        ]
        self.dropouts = [(n, m) for n, m in named if isinstance(m, Dropout)]
        self.missing = sorted(kinds.keys() - set(self.names))

    def current(self) -> bool:
        """Whether the modules are still those this watch was built over."""
        return not [1 for modules, key, child in self.slots if modules.get(key) is not child]

    def disturbance(self) -> str:
        """Why the fused paths would not mean what the modules mean; empty while they do."""
        if self.missing:
            return f"{self.missing[0]} was removed"
        if list(map(type, self.children)) != self.types:
            for name, child, kind in zip(self.names, self.children, self.types, strict=True):
                if type(child) is not kind:
                    return f"{name} is a {type(child).__name__}, not vitkern's own module"
        if any(self.hooks) or torch_module._has_any_global_hook():
            for index, hook in enumerate(self.hooks):
                if hook:
                    return f"{self.names[index // len(HOOKS)]} has a hook"
            return "a global module hook is registered"
        if [own for own in self.own if "forward" in own]:
            for name, own in zip(self.names, self.own, strict=True):
                if "forward" in own:
                    return f"{name}.forward was replaced"
        if not _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, self.parameters)))):
            for name, parameters in zip(self.names, self.parameters, strict=True):
                for key, value in parameters.items():
                    if type(value) not in _PLAIN:
                        return f"{name}.{key} is a {type(value).__name__}"
        for name, parameters, key in self.needed:
            if parameters.get(key) is None:
                return f"{name} has no parameter {key}, which the operators need"
        return ""


def why_not_fused(model: nn.Module, device: torch.device) -> str:
    """ "" when the fused operators compute what the modules would, else the reason in one line."""
    if device.type not in ("cpu", "cuda"):
        return f"there are no kernels for device {device.type}"
    if torch.jit.is_tracing():
        return "torch.jit is tracing"
    if torch.compiler.is_compiling():
        return _seen_while_compiling(model)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if _python_dispatch._len_torch_dispatch_stack():
        return "a torch dispatch mode (a FLOP counter, fake tensors) is active"
    if model.training:
        for i, block in enumerate(model.blocks):
            mlp = getattr(block, "mlp", None)
            if type(mlp) is Mlp and mlp.drop1.p != mlp.drop2.p:
                return f"blocks.{i}.mlp has two dropout rates, the operator takes one"
    return model._watch().disturbance()


def _seen_while_compiling(model: nn.Module) -> str:
    """Only hooks and types, in terms the compiler can trace; a change makes it compile again."""
    for name, module in model.named_modules():
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"{name} has a hook"
        if name and type(module) is not model._kinds.get(name):
            return f"{name} is a {type(module).__name__}, not vitkern's own module"
        if name and "forward" in module.__dict__:
            return f"{name}.forward was replaced"
        if name and name != "head_norm":
            for key in _NEEDED.get(type(module), ()):
                if module._parameters.get(key) is None:
                    return f"{name} has no parameter {key}, which the operators need"
        if model.training and type(module) is Mlp and module.drop1.p != module.drop2.p:
            return f"{name} has two dropout rates, the operator takes one"
    return ""


def why_not_engine(model: nn.Module, image: Tensor | None, precision: str) -> str:
    """ "" when the packed engine can serve this call, else the reason in one line."""
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export is tracing"
    if model.training:
        return "the model is in training mode; call model.eval()"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives are on"
    if torch.is_grad_enabled():
        return "gradients are enabled; use torch.inference_mode() or torch.no_grad()"
    if image is not None and type(image) not in (Tensor, nn.Parameter):
        return f"the image is a {type(image).__name__}"
    reason = unlike_config(model)
    if reason:
        return reason
    try:
        if model.device.type == "cuda":
            from .engines import gpu as engine
        else:
            from .engines import cpu as engine
    except ImportError as error:
        return f"what the engine needs is not installed ({error})"
    return engine.why_not(model, image, precision) if image is not None else ""


def choose(model: nn.Module, image: Tensor | None, want: str) -> tuple[str, str]:
    """(path, reason) of a call that wants "logits", "tokens" or "blocks" (intermediate results)."""
    device = model.device if image is None else image.device
    forced = model.path
    if forced == "reference":
        return "reference", 'model.path is "reference"'
    reason = why_not_fused(model, device)
    if reason:
        if forced != "auto":
            raise RuntimeError(
                f"ViT: path {forced!r} is impossible: {reason}; set model.path = 'auto'"
            )
        return "reference", reason
    if forced == "fused":
        return "fused", 'model.path is "fused"'
    if want == "blocks":
        reason = "the engine does not keep the blocks' results"
    else:
        reason = why_not_engine(model, image, precision_of(model))
    if reason and forced == "engine":
        raise RuntimeError(f"ViT: path 'engine' is impossible: {reason}; set model.path = 'auto'")
    return (
        ("fused", reason) if reason else ("engine", "eval mode, gradients off, nothing in the way")
    )


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """What matrices are cast to: autocast's dtype, `model.precision`'s, or None (as they are)."""
    device = model.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif model.precision is None:
        return None
    else:
        dtype = PRECISIONS[model.precision]
    if {dtype, model.dtype} == {torch.float16, torch.bfloat16}:
        raise ValueError(
            f"ViT: a {str(model.dtype)[6:]} model cannot compute in {str(dtype)[6:]}: convert it"
            f" with .to({dtype}) or .float(), or turn autocast or model.precision off"
        )
    return None if dtype == model.dtype or model.dtype == torch.float64 else dtype


def precision_of(model: nn.Module) -> str:
    """The precision of the next forward: its name in PRECISIONS, or else the dtype's own name."""
    dtype = compute_dtype(model) or model.dtype
    names = [name for name, operands in PRECISIONS.items() if operands == dtype]
    if model.precision in names:
        return model.precision
    return names[0] if names else str(dtype).removeprefix("torch.")


def explain(model: nn.Module, image: Tensor | None) -> str:
    """The path of the next forward and its reason, with precision, device and instruction set."""
    path, reason = choose(model, image, "logits")
    what = {
        "engine": "packed engine, one native call per forward",
        "fused": "fused operators, one call per operator",
        "reference": "plain PyTorch, module by module",
    }[path]
    lines = [f"path: {path} ({what})", f"why: {reason}", f"precision: {precision_of(model)}"]
    lines.append(f"device: {model.device}")
    if model.device.type == "cpu":
        lines.append(f"instruction set: {_isa() if path != 'reference' else 'chosen by PyTorch'}")
        if path == "fused" and (compute_dtype(model) or model.dtype) not in PRECISIONS.values():
            lines.append(
                "note: this dtype has no native kernel; the operators run their PyTorch references"
            )
    elif path != "reference":
        lines.append(f"kernels: {_gpu_kernels(model)}")
    return "\n".join(lines)


def _gpu_kernels(model: nn.Module) -> str:
    if model.dtype == torch.float64:
        return "PyTorch's (float64 has none of its own)"
    try:
        from .gpu.runtime import device

        return device.executor(model.device).status()
    except (ImportError, RuntimeError) as error:
        return f"PyTorch's: the GPU backend is not available ({error})"


def _isa() -> str:
    try:
        from . import cpu

        return cpu.isa()
    except (ImportError, AttributeError, ValueError) as error:
        return f"unknown ({error})"


def unlike_config(model: nn.Module) -> str:
    """The engine is built from the configuration: the modules must still agree with it."""
    c = model.config
    if len(model.blocks) != c.depth:
        return f"the model has {len(model.blocks)} blocks, its configuration {c.depth}"
    if isinstance(model.head, nn.Linear) and model.head.out_features != c.classes:
        return f"the head has {model.head.out_features} outputs, the configuration {c.classes}"
    proj = model.patch_embed.proj
    size = (c.patch_size, c.patch_size)
    shape = (proj.kernel_size, proj.stride, proj.padding, proj.dilation, proj.groups)
    if shape != (size, size, (0, 0), (1, 1), 1):
        return f"patch_embed.proj is no projection of {c.patch_size}x{c.patch_size} patches"
    for i, block in enumerate(model.blocks):
        if block.attn.heads != c.heads or block.mlp.act.name != c.activation:
            return f"blocks.{i} has other heads or another activation than the configuration"
    watch = model._watcher or model._watch()  # why_not_fused has just looked
    for name, norm in watch.norms:
        if norm.eps != c.norm_eps:
            return f"{name}.eps is {norm.eps}, the configuration's {c.norm_eps}"
        if norm.weight is None or norm.bias is None:
            return f"{name} has no weight or no bias"
    for name, dropout in watch.dropouts:
        if dropout.training and dropout.p:
            return f"{name} is in training mode"
    return ""
