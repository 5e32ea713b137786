"""What users do to a model between two forwards: each change is (description, function of it)."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable

import torch
from torch import nn

import vitkern
from vitkern import ViT

from . import odd

Change = tuple[str, Callable[[ViT], object]]


def _parameter(rng: random.Random) -> Callable[[ViT], tuple[nn.Module, str, nn.Parameter]]:
    """Chooses one of a model's parameters: (its module, its name there, itself)."""
    share = rng.random()
    named = rng.choice(("", "", "head.bias", "ls1.gamma", "qkv.weight", "pos_embed", "cls_token"))

    def choose(model: ViT) -> tuple[nn.Module, str, nn.Parameter]:
        names = [n for n, _ in model.named_parameters() if named in n]
        names = names or [n for n, _ in model.named_parameters()]
        owner, _, key = names[int(share * len(names))].rpartition(".")
        module = model.get_submodule(owner)
        return module, key, module._parameters[key]

    return choose


# ---- parameters of another shape, dtype or kind ----

RESHAPED: dict[str, Callable] = {
    "a leading axis": lambda p: p[None],
    "two leading axes": lambda p: p[None, None],
    "a trailing axis": lambda p: p[..., None],
    "a scalar": lambda p: p.reshape(-1)[0] if p.numel() else p.sum(),
    "one element": lambda p: p.reshape(-1)[:1],
    "its first row": lambda p: p[:1],
    "flat": lambda p: p.reshape(-1),
    "a row more": lambda p: torch.cat([p, p[:1]]),
    "a row less": lambda p: p[1:],
    "empty": lambda p: p[:0],
    "transposed": lambda p: p.mT if p.ndim > 1 else p,
    "transposed in memory": lambda p: p.mT.contiguous().mT if p.ndim > 1 else p,
    "a negative view": lambda p: torch._neg_view(p),
    "an expanded view": lambda p: p.reshape(-1)[:1].expand(p.numel()).view_as(p),
    "a zero tensor": lambda p: torch._efficientzerotensor(p.shape, dtype=p.dtype),
    "float64": lambda p: p.double(),
    "bfloat16": lambda p: p.bfloat16(),
    "float16": lambda p: p.half(),
    "on meta": lambda p: p.to("meta"),
    "strided": lambda p: torch.stack([p, p], -1)[..., 0],
    "NaN": lambda p: p * float("nan"),
    "large": lambda p: p * 1e3,
    "sparse": lambda p: p.to_sparse(),
    "an inference tensor": lambda p: _inference(p),
}  # fmt: skip


def _inference(p: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return p.clone()


def replace(rng: random.Random) -> Change:
    choose, kind, grad = _parameter(rng), rng.choice(list(RESHAPED)), rng.random() < 0.3

    def change(model: ViT) -> None:
        module, key, p = choose(model)
        new = RESHAPED[kind](p.detach())
        new = nn.Parameter(new, requires_grad=grad and not new.is_inference())
        module._parameters[key] = new  # as setattr does

    return f"a parameter replaced: {kind}", change


def foreign_parameter(rng: random.Random) -> Change:
    choose, kind = _parameter(rng), rng.choice(("None", "buffer", "subclass", "wrapped", "lazy"))

    def change(model: ViT) -> None:
        module, key, p = choose(model)
        if kind == "None":
            setattr(module, key, None)
        elif kind == "buffer":
            delattr(module, key)
            module.register_buffer(key, p.detach() * 2)
        elif kind == "subclass":
            setattr(module, key, nn.Parameter(p.detach().as_subclass(odd.Subclass)))
        elif kind == "wrapped" and p.ndim > 1:
            nn.utils.parametrizations.weight_norm(module, key)
        elif kind == "lazy":
            module._parameters[key] = nn.UninitializedParameter()

    return f"a parameter made {kind}", change


# ---- writes that leave the tensor in place ----


def _by_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[...] *= -1.5


def _spare_torch(*parameters: torch.Tensor) -> None:
    """torch itself dies when the memory of a zero tensor, which has none, is shared or written."""
    if any(p._is_zerotensor() for p in parameters if type(p) is nn.Parameter):
        raise ValueError("a zero tensor has no memory")


def _by_sharing(p: nn.Parameter) -> None:
    _spare_torch(p)
    p.share_memory_().data.mul_(-1.5)


def _by_storage(p: nn.Parameter) -> None:
    _spare_torch(p)
    torch.tensor([], dtype=p.dtype).set_(p.untyped_storage()).mul_(-1.5)


def _by_swap(p: nn.Parameter) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(p.detach() * -1.5))


def _by_set(p: nn.Parameter) -> None:
    p.data = p.data * -1.5


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "p.data.mul_": lambda p: p.data.mul_(-1.5),
    "p.data.copy_": lambda p: p.data.copy_(torch.ones_like(p) / 3),
    "p.detach().mul_": lambda p: p.detach().mul_(-1.5),
    "numpy": _by_numpy,
    "its storage": _by_storage,
    "p.data =": _by_set,
    "swap_tensors": _by_swap,
    "share_memory_, then p.data": _by_sharing,
    "under inference_mode": lambda p: _in_inference(p),
    "foreach": lambda p: torch._foreach_mul_([p.data], -1.5),
    "out=": lambda p: torch.mul(p.data, -1.5, out=p.data),
}  # fmt: skip


def _in_inference(p: nn.Parameter) -> None:
    with torch.inference_mode():
        p.mul_(-1.5)


def write(rng: random.Random) -> Change:
    choose, how = _parameter(rng), rng.choice(list(WRITES))

    def change(model: ViT) -> None:
        with torch.no_grad():
            WRITES[how](choose(model)[2])

    return f"a parameter written by {how}", change


def write_a_part(rng: random.Random) -> Change:
    """Behind the version counter's back, and not every element: repack() is documented for it."""
    choose, share = _parameter(rng), rng.random()

    def change(model: ViT) -> None:
        flat = choose(model)[2].data.view(-1)
        flat[int(share * flat.numel())] += 7
        model.repack()

    return "one element written by p.data, then repack", change


def optimise(rng: random.Random) -> Change:
    name = rng.choice(("SGD", "Adam", "AdamW"))
    how = rng.choice(({}, {"foreach": True}, {"fused": True}))
    momentum = {"momentum": 0.9} if name == "SGD" and rng.random() < 0.5 else {}

    def change(model: ViT) -> None:
        c = model.config
        _spare_torch(*model.parameters())
        for p in model.parameters():
            p.requires_grad_()
        size = (2, c.channels, *c.pixels)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **how, **momentum)
        with torch.enable_grad():
            model(torch.ones(size, dtype=model.dtype)).square().sum().backward()
        optimizer.step()

    return f"a step of {name}({how or ''}{momentum or ''})", change


# ---- methods ----


def resize(rng: random.Random) -> Change:
    sizes = (8, 12, 16, (24, 16), (16, 24), (4, 4), (0, 4), -4, 5, (5, 5), 2**40, None, "16", 1.5)
    size, patch = rng.choice(sizes), rng.choice((None, None, None, 2, 4, 8, 3, 0, -1, 2**40))
    if size in (2**40,) and patch not in (None, 2**40):
        patch = None
    return f"set_input_size({size}, {patch})", lambda model: model.set_input_size(size, patch)


def reclassify(rng: random.Random) -> Change:
    classes = rng.choice((0, 1, 5, 37, -1, 2**40, 2**63, 1.5, None, "3", True))
    pool = rng.choice((None, None, "token", "avg", "mean", "", "none", "max", 3))

    def change(model: ViT) -> None:
        model.reset_classifier(classes, pool)
        if isinstance(model.head, nn.Linear) and model.head.weight.device.type == "cpu":
            nn.init.normal_(model.head.weight)

    return f"reset_classifier({classes}, {pool!r})", change


def select(rng: random.Random) -> Change:
    name = rng.choice(("path", "precision"))
    value = rng.choice(("auto", "engine", "fused", "reference", "fp32", "bf16", "tf32", None, 3))
    return f"model.{name} = {value!r}", lambda model: setattr(model, name, value)


def convert(rng: random.Random) -> Change:
    name, how = rng.choice(list(CONVERSIONS.items()))
    return name, how


def _through_pickle(model: ViT) -> ViT:
    return pickle.loads(pickle.dumps(model))


def _through_file(model: ViT) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), assign=True)


def _negative_state(model: ViT) -> None:
    state = {name: torch._neg_view(p.detach()) for name, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CONVERSIONS: dict[str, Callable[[ViT], object]] = {
    "bfloat16()": lambda model: model.bfloat16(),
    "float()": lambda model: model.float(),
    "double()": lambda model: model.double(),
    "half()": lambda model: model.half(),
    "to('meta')": lambda model: model.to("meta"),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": _through_pickle,
    "a state dict by assignment": _through_file,
    "negated by assignment": _negative_state,
    "accelerate": vitkern.accelerate,
    "accelerate bf16": lambda model: vitkern.accelerate(model, "bf16"),
    "train, then eval": lambda model: model.train().eval(),
    "repack": lambda model: model.repack(),
    "requires_grad_(False)": lambda model: model.requires_grad_(False),
    "apply": lambda model: model.apply(lambda module: module.train(False)),
    "share_memory": lambda model: (_spare_torch(*model.parameters()), model.share_memory()),
    "zero blocks": lambda model: setattr(model, "blocks", nn.Sequential()),
    "a block less": lambda model: model.blocks.pop(0),
    "a block twice": lambda model: model.blocks.append(model.blocks[0]),
    "block 0 again": lambda model: model.blocks.__setitem__(-1, model.blocks[0]),
    "a hook": lambda model: model.norm.register_forward_hook(lambda m, a, y: y * 2),
    "norm replaced": lambda model: setattr(model, "norm", nn.LayerNorm(model.embed_dim)),
    "norm removed": lambda model: setattr(model, "norm", nn.Identity()),
    "another eps": lambda model: setattr(model.blocks[0].norm1, "eps", 0.5),
    "other heads": lambda model: setattr(model.blocks[0].attn, "heads", 1),
    "a head of two": lambda model: setattr(model, "head", nn.Sequential(model.head, nn.Tanh())),
    "no head": lambda model: setattr(model, "head", nn.Identity()),
    "head None": lambda model: setattr(model, "head", None),
    "a tied weight": lambda model: setattr(
        model.blocks[0].norm1, "weight", model.blocks[0].norm2.weight
    ),
    "depth in config": lambda model: setattr(model, "config", model.config.replace(depth=1)),
    "intermediates": lambda model: model.forward_intermediates(torch.zeros(1, 3, 24, 16), 1),
    "odd intermediates": lambda model: model.forward_intermediates(
        torch.zeros(1, 3, 24, 16), [-1, "a", 10**30]
    ),
    "summary": lambda model: model.summary(2**31, show=False),
    "explain": lambda model: model.explain(),
}  # fmt: skip


CHANGES = (
    replace, replace, foreign_parameter, write, write, write_a_part, optimise, resize, reclassify,
    select, convert, convert,
)  # fmt: skip
