"""vitkern._C.Engine in any order of calls, with weights and inputs of odd names and sizes.

Memory is real wherever an address is given, and as large as the sizes that are not absurd.
"""

from __future__ import annotations

import itertools
import pathlib
import random
from collections.abc import Callable

import torch
from torch import Tensor

from vitkern import _C

from .bindings import IMPOSSIBLE, _enum
from .outcome import OK, REFUSED, Case, Wrong, judge, refused

CONFIG = {"channels": 3, "patch_y": 4, "patch_x": 4, "width": 16, "heads": 2, "mlp_width": 24}
MORE = {
    "depth": 1, "eps": 1e-6, "activation": _C.Activation.gelu, "precision": _C.Precision.fp32,
    "norm": _C.NormKind.layer, "order": _C.Order.pre_norm,
}  # fmt: skip
CLASSES, ROOM = 5, 2**16  # floats of every buffer
D, F = CONFIG["width"], CONFIG["mlp_width"]
MATRICES = {
    "patch_embed.proj.weight": (D, 3 * 4 * 4), "head.weight": (CLASSES, D),
    "blocks.0.attn.qkv.weight": (3 * D, D), "blocks.0.attn.proj.weight": (D, D),
    "blocks.0.mlp.fc1.weight": (F, D), "blocks.0.mlp.fc2.weight": (D, F),
}  # fmt: skip
VECTORS = {
    "patch_embed.proj.bias": D, "norm.weight": D, "norm.bias": D, "head.bias": CLASSES,
    "blocks.0.norm1.weight": D, "blocks.0.norm1.bias": D, "blocks.0.norm2.weight": D,
    "blocks.0.norm2.bias": D, "blocks.0.attn.qkv.bias": 3 * D, "blocks.0.attn.proj.bias": D,
    "blocks.0.mlp.fc1.bias": F, "blocks.0.mlp.fc2.bias": D,
}  # fmt: skip
NAMES = (*MATRICES, *VECTORS, "", "nonesuch", "blocks.1.norm1.weight", "blocks.-1.ls1.gamma", "\0")
SIZES = (0, 1, CLASSES, D, F, 48, 64, *IMPOSSIBLE)


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    chance = rng.random()
    if chance < 0.08:
        return without_init(rng)
    config = {**CONFIG, **MORE}
    if chance < 0.25:
        for _ in range(rng.choice((1, 2))):
            spoil_config(rng, config)
    calls = [*set_all(), finish, forward({})]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        spoil_calls(rng, calls)
    isa = rng.choice(("", "", "portable", "avx2", "avx2_int16", "nonesuch"))
    changed = {k: v for k, v in config.items() if {**CONFIG, **MORE}.get(k) != v}
    names = [call.about for call in calls if not call.plain]
    about = f"_C.Engine({isa!r}, {changed or ''}): {'; '.join(names)}"
    return Case(about, lambda: run(isa, config, calls))


class Call:
    """A call of one method; `plain` ones are what everybody does and are not worth a word."""

    def __init__(self, about: str, do: Callable[[object, Tensor], object], plain: bool = False):
        self.about, self.do, self.plain = about, do, plain


def run(isa: str, config: dict, calls: list[Call]) -> str:
    memory = torch.randn(ROOM, generator=torch.Generator().manual_seed(0)) / 4
    engines = []
    if refused(lambda: engines.append(_C.Engine(isa, **config))):
        return REFUSED
    if config.keys() != {*CONFIG, *MORE}:
        raise Wrong(f"an engine was made of these keywords: {', '.join(config)}")
    outcome, results = OK, []
    for call in calls:
        try:
            results.append(call.do(engines[0], memory))
        except Exception as error:
            if judge(error) != REFUSED:
                raise
            outcome = REFUSED
    whole = [y for y in results if isinstance(y, Tensor)]
    for a, b in itertools.pairwise(whole):  # the same input: whatever happened in between
        if a.shape == b.shape and not torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)):
            raise Wrong("two forwards of the same image differ: its weights changed in between")
    return outcome


def set_all() -> list[Call]:
    calls = [set_matrix(name, *shape, plain=True) for name, shape in MATRICES.items()]
    return calls + [set_vector(name, n, plain=True) for name, n in VECTORS.items()]


def set_matrix(name: str, N: int, K: int, dtype=_C.DType.f32, null=False, plain=False) -> Call:
    def do(engine, memory: Tensor) -> None:
        engine.set_matrix(name, dtype, 0 if null else memory.data_ptr(), N, K)

    words = f"set_matrix({name!r}, {dtype}, {'null' if null else 'memory'}, {N}, {K})"
    return Call(words, do, plain)


def set_vector(name: str, n: int, null=False, plain=False) -> Call:
    def do(engine, memory: Tensor) -> None:
        engine.set_vector(name, 0 if null else memory.data_ptr(), n)

    return Call(f"set_vector({name!r}, {'null' if null else 'memory'}, {n})", do, plain)


finish = Call("finish()", lambda engine, memory: engine.finish(), plain=True)
FORWARD = {
    "threads": 2, "dtype": _C.DType.f32, "B": 2, "Y": 8, "X": 4, "T": 1, "pool": _C.Pool.token,
    "head": True, "image": None, "prefix": None, "position": None, "mean": 0, "std": 0, "y": None,
    "strides": (96, 32, 4, 1), "biases": [], "turns": [], "blocks": 1, "norm": True,
    "kept": [], "norm_kept": False,
}  # fmt: skip


def forward(changes: dict[str, object], missing: str = "") -> Call:
    """One forward; None stands for memory. Returns the logits, or None where they are not those."""

    def do(engine, memory: Tensor) -> Tensor | None:
        y = torch.full((ROOM,), float("nan"))
        given = {**FORWARD, **changes}
        for name in ("image", "prefix", "position"):
            given[name] = memory.data_ptr() if given[name] is None else given[name]
        given["biases"] = [memory.data_ptr() if b is None else b for b in given["biases"]]
        given["y"] = y.data_ptr() if given["y"] is None else given["y"]
        given.pop(missing, None)
        engine.forward(**given)
        if changes or missing:
            return None
        return y[: 2 * (engine.classes or D)]

    words = ", ".join(f"{k}={str(v)[:40]}" for k, v in changes.items())
    return Call(f"forward({words}{f' without {missing}' if missing else ''})", do, not words)


def spoil_config(rng: random.Random, config: dict) -> None:
    name = rng.choice(list(config))
    if name in ("activation", "precision", "norm", "order"):
        config[name] = _enum(rng)
    elif name == "eps":
        config[name] = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e300, None, "1"))
    elif rng.random() < 0.15:
        config.pop(name)
    elif rng.random() < 0.15:
        config[rng.choice(("nonesuch", "Depth", "layers"))] = 1
    else:
        config[name] = rng.choice((0, 1, 3, 2, 7, 10**9, *IMPOSSIBLE))


def spoil_calls(rng: random.Random, calls: list[Call]) -> None:
    """Add, remove or move a call."""
    what, place = rng.random(), rng.randrange(len(calls) + 1)
    if what < 0.1:
        calls.pop(rng.randrange(len(calls)))
    elif what < 0.2:
        calls.insert(place, finish)
    elif what < 0.3:
        calls.append(forward({}))
    elif what < 0.45:  # after finish(): what it points to must not move
        name = rng.choice(list(VECTORS))
        calls.append(set_vector(name, rng.choice((VECTORS[name], VECTORS[name], 1, 4096))))
        calls.append(forward({}))
    elif what < 0.55:
        name = rng.choice(list(MATRICES))
        calls.append(set_matrix(name, *MATRICES[name]))
        calls.append(forward({}))
    elif what < 0.65:
        dtype = rng.choice((_C.DType.f32, _C.DType.bf16, _C.DType.u8, _enum(rng)))
        name, N, K = rng.choice(NAMES), rng.choice(SIZES), rng.choice(SIZES)
        calls.insert(place, set_matrix(name, N, K, dtype, rng.random() < 0.3))
    elif what < 0.75:
        name, n = rng.choice(NAMES), rng.choice(SIZES)
        calls.insert(place, set_vector(name, n, rng.random() < 0.3))
    else:
        missing = rng.choice(list(FORWARD)) if rng.random() < 0.1 else ""
        calls.append(
            forward(dict(input_change(rng) for _ in range(rng.choice((1, 1, 2)))), missing)
        )


def input_change(rng: random.Random) -> tuple[str, object]:
    name = rng.choice(list(FORWARD))
    if name in ("B", "Y", "X", "T"):
        # No odd number of whole patches: what memory would be needed, only the caller knows.
        wrong = (0, 1, 5, *IMPOSSIBLE) if name in "YX" else (0, 1, *IMPOSSIBLE)
        return name, rng.choice(wrong)
    if name in ("image", "prefix", "position", "y"):
        return name, 0
    if name in ("mean", "std"):
        return name, 0
    if name == "kept":
        return name, rng.choice(([0], [0, 0], [-1], "x", 3))
    if name == "blocks":
        return name, rng.choice((0, 2, *IMPOSSIBLE))
    if name == "biases":
        return name, rng.choice(([0], [None, None], [None] * 1000, [-1], "x", 3))
    if name == "strides":
        return name, rng.choice(((1, 1, 1), (1,) * 5, (-1,) * 4, (2**62,) * 4, (), "x", (0,) * 4))
    if name == "threads":
        return rng.choice((name, name, "Threads")), rng.choice((0, -1, 3, 2**31 - 1, 2**40))
    return name, rng.choice((_enum(rng), _enum(rng), None, "x"))


def without_init(rng: random.Random) -> Case:
    """Objects whose __init__ never ran."""
    kinds = (_C.Engine, _C.Places, _C.LaunchList, _C.Graph, _C.Variants, _C.Kernel, _C.Driver)
    kind = rng.choice((*kinds, _C.Slot))
    names = [name for name in dir(kind) if not name.startswith("_")] + ["__repr__"]
    name, call = rng.choice(names), rng.random() < 0.7

    def do() -> str:
        value = getattr(kind.__new__(kind), name)
        if call and callable(value):
            value()
        return OK

    def run() -> str:
        return REFUSED if refused(do) else OK

    return Case(f"_C.{kind.__name__}.__new__().{name}{'()' * call}", run)
