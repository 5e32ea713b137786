"""What a model's modules are at a moment, and whether that still holds.

The engines and the fused operators read parameters and skip the modules around them. That is only
right while every module is the one that vitkern put there and nobody listens to it. `Structure`
looks at all of that once, in a millisecond, and keeps its findings in words; `holds` then compares
every fact they rest on with what is there, at each forward, in microseconds (csrc/watch.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import _C
from ..blocks import ParallelBlock
from ..layers import Activation, Attention, Dropout, DropPath, Mlp

if TYPE_CHECKING:
    from ..model import ViT

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = frozenset({nn.Parameter, Tensor, type(None)})  # anything else computes in its own way
_CALLS_KEPT = 64  # shapes of images, mostly
# What the operators read of a module; torch's own modules do without some of these.
NEEDED = {
    nn.LayerNorm: ("weight", "bias"), nn.RMSNorm: ("weight",),
    nn.Linear: ("weight",), nn.Conv2d: ("weight",),
}  # fmt: skip
# What else a module's forward depends on, and the findings with it.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    nn.LayerNorm: ("eps",),
    nn.RMSNorm: ("eps",),
    nn.Conv2d: ("kernel_size", "stride", "padding", "dilation", "groups"),
    Attention: ("heads", "grid", "prefix", "rope", "rope_half", "separate"),
    ParallelBlock: ("heads", "hidden", "rope", "rope_half", "kind"),
    Mlp: ("kind",),
    Activation: ("name",),
    Dropout: ("p", "training"),
    DropPath: ("p", "training"),
}


class Structure:
    """The findings about a model's modules, and the facts that they rest on.

    not_fused: why the fused operators would not compute what the modules compute; "" if they do.
    uneven_dropout: the same for training alone.
    not_engine: why an engine would not, which is built from the configuration.
    """

    def __init__(self, model: ViT) -> None:
        self.config = model.config
        entries: list[object] = []
        absent: list[object] = []
        tables: list[object] = []
        empty: list[object] = []
        types: list[object] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        for name, module in self._modules.items():
            for slots in (module._modules, module._parameters):
                _note(slots, tables, empty)
                for value in slots.values():
                    types += (value, type(value))
            if not name:  # the model itself: its hooks run before and after any path
                continue
            own = module.__dict__
            for hooks in HOOKS:
                _note(own[hooks], tables, empty)
            for key in _ATTRIBUTES.get(type(module), ()):
                if key != "training" or module.p:  # at rate 0 nothing depends on it
                    entries += (own, key, own.get(key))
            if "forward" in own:
                entries += (own, "forward", own["forward"])
            else:
                absent += (own, "forward")
        dicts = {id(one): one for one in (*tables[::3], *entries[::3], *absent[::2])}.values()
        self._facts = tuple(map(tuple, (dicts, tables, entries, absent, empty, types)))
        self._watch = _C.Watch()
        self.not_fused = self._not_fused(model.kinds)
        self.uneven_dropout = self._uneven_dropout()
        self.not_engine = "" if self.not_fused else self._not_engine()
        self._served: dict[tuple[object, ...], str] = {}

    def holds(self, model: ViT) -> bool:
        """Whether the model is still as it was looked at."""
        return self.config is model.config and self._watch.holds(*self._facts)

    def served(self, asked: tuple[object, ...]) -> str | None:
        """What `remember` was told of such a call: while the structure holds, it is still true."""
        return self._served.get(asked)

    def remember(self, asked: tuple[object, ...], precision: str) -> None:
        """That a call was served by the engine of a precision."""
        if len(self._served) >= _CALLS_KEPT:
            self._served.clear()
        self._served[asked] = precision

    def _not_fused(self, kinds: dict[str, type]) -> str:
        for name in sorted(kinds.keys() - self._modules.keys()):
            return f"{name} was removed"
        for name, module in self._modules.items():
            if name and type(module) is not kinds.get(name):
                return f"{name} is a {type(module).__name__}, not vitkern's own module"
        for name, module in self._modules.items():
            if name and any(getattr(module, hooks) for hooks in HOOKS):
                return f"{name} has a hook"
            if name and "forward" in module.__dict__:
                return f"{name}.forward was replaced"
            for key, value in module._parameters.items():
                if type(value) not in _PLAIN:
                    return f"{name + '.' if name else ''}{key} is a {type(value).__name__}"
            reason = lacks_parameter(name, module)
            if reason:
                return reason
        return ""

    def _uneven_dropout(self) -> str:
        for name, module in self._modules.items():
            if uneven_dropout(module):
                return f"{name} has two dropout rates, the operator takes one"
        return ""

    def _not_engine(self) -> str:
        c = self.config
        blocks = len(self._modules["blocks"]._modules)
        if blocks != c.depth:
            return f"the model has {blocks} blocks, its configuration {c.depth}"
        head, proj = self._modules["head"], self._modules["patch_embed.proj"]
        outputs = head.weight.shape[0] if isinstance(head, nn.Linear) else c.classes
        if outputs != c.classes:
            return f"the head has {outputs} outputs, the configuration {c.classes}"
        size = (c.patch_size, c.patch_size)
        shape = tuple(getattr(proj, key) for key in _ATTRIBUTES[nn.Conv2d])
        if shape != (size, size, (0, 0), (1, 1), 1):
            return f"patch_embed.proj is no projection of {c.patch_size}x{c.patch_size} patches"
        for name, module in self._modules.items():
            heads = isinstance(module, Attention | ParallelBlock) and module.heads != c.heads
            act = name.startswith("blocks.") and name.endswith(("mlp.act", "mlp_act"))
            if heads or (act and module.name != c.activation):
                block = ".".join(name.split(".")[:2])
                return f"{block} has other heads or another activation than the configuration"
            normed = type(module) in (nn.LayerNorm, nn.RMSNorm) and name != "head_norm"
            if normed and module.eps != c.norm_eps:
                return f"{name}.eps is {module.eps}, the configuration's {c.norm_eps}"
            if isinstance(module, Dropout) and module.rate:
                return f"{name} is in training mode"
        return ""


def _note(slots: dict[str, Any], tables: list[object], empty: list[object]) -> None:
    """All entries of a dict."""
    if not slots:
        empty.append(slots)
    for key, value in slots.items():
        tables += (slots, key, value)


def lacks_parameter(name: str, module: nn.Module) -> str:
    """Why the operators cannot read this module: a parameter that they need is None."""
    if name != "head_norm":  # which always runs as a module
        for key in NEEDED.get(type(module), ()):
            if module._parameters.get(key) is None:
                return f"{name} has no parameter {key}, which the operators need"
    return ""


def uneven_dropout(module: nn.Module) -> bool:
    """Whether an MLP drops its hidden rows at another rate than its result."""
    return type(module) is Mlp and module.drop1.p != module.drop2.p
