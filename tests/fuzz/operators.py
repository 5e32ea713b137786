"""vitkern.ops: valid calls against the definition, and the same calls with something broken."""

from __future__ import annotations

import inspect
import pathlib
import random

import torch
from torch import Tensor

from vitkern import ops
from vitkern.registry import REGISTRY, Operator

from . import odd
from .odd import Odd
from .outcome import OK, REFUSED, Case, Wrong, check_close, judge

OPERATORS = sorted({spec.op.name: spec.op for spec in REGISTRY.values()}.items())
PROBABILITIES = (0.0, 0.0, 0.0, 0.3, 1.0, 1e-9, 1 - 2**-24)
BAD_PROBABILITIES = (-0.1, 1.5, float("nan"), float("inf"), "0.5", None, 10**400)
EPS = (1e-6, 1e-6, 1e-5, 0.0, 1e300)
SCALES = (None, None, 0.125, 0.0, -1.0, 1e4)
ACTIVATIONS = ops.ACTIVATIONS
BAD_ACTIVATIONS = ("relu", "", None, 3, "GELU", "none ")
SEEDS = (0, 7, -5, 2**62, -(2**63))


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    name, op = rng.choice(OPERATORS)
    arguments = valid(rng, op)
    gradients = rng.random() < 0.15
    if gradients:
        for argument in arguments.values():
            if isinstance(argument, Odd):
                argument.grad = rng.random() < 0.7
    breaks = rng.choice((0, 0, 0, 1, 1, 1, 2))
    for _ in range(breaks):
        rng.choice(BREAKS)(rng, op, arguments)
    threads = rng.choice((1, 2, 3))
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return Case(
        f"ops.{name}({given}), {threads} threads",
        lambda: call(op, arguments, threads),
    )


# ---- valid arguments ----


def valid(rng: random.Random, op: Operator) -> dict[str, object]:
    """Arguments of the public function: tensors of agreeing sizes, numbers in range."""
    sizes = {letter: rng.choice(odd.SIZES) for letter in "BSDHEFKNTCMO"}
    sizes |= {"py": rng.choice((1, 2, 4, 5)), "px": rng.choice((1, 2, 3, 8))}
    if rng.random() < 0.25:
        sizes[rng.choice(list(sizes))] = 0
    if rng.random() < 0.1:
        sizes[rng.choice("BSHMN")] = rng.choice(odd.HUGE)
        sizes[rng.choice("DEFKN")] = 0
    down, across = rng.choice((1, 2, 3)), rng.choice((1, 2, 5))
    if op.name == "patch_embed":
        sizes |= {"Y": down * sizes["py"], "X": across * sizes["px"], "N": down * across}
    signature = inspect.signature(getattr(ops, op.name)).parameters
    dtype = rng.choice(odd.FLOATS)
    arguments: dict[str, object] = {}
    for name, parameter in signature.items():
        if name in op.axes and name not in op.integers:
            if parameter.default is None and rng.random() < 0.4:
                continue  # an optional tensor that is not given
            if parameter.annotation.endswith("None") and rng.random() < 0.3:
                arguments[name] = None
                continue
            arguments[name] = tensor(rng, op, name, sizes, dtype)
    arguments |= numbers(rng, signature, sizes)
    if op.name == "patch_embed":
        image = tensor(rng, op, "image", sizes, rng.choice((dtype, dtype, "uint8")))
        arguments = {"image": image, **arguments}
        if ("mean" in arguments) != ("std" in arguments) and rng.random() < 0.9:
            for name in ("mean", "std"):
                arguments.pop(name, None)
    if op.name == "attention" and rng.random() < 0.3:
        arguments.pop("bias", None)
        arguments["qkv"].shape = (1, *arguments["qkv"].shape[1:])
        arguments["offsets"] = offsets(rng, sizes["S"])
    return arguments


def tensor(rng: random.Random, op: Operator, name: str, sizes: dict, dtype: str) -> Odd:
    shape: list[int] = []
    for letter in op.axes[name].split():
        if letter == "...":
            shape += [sizes["M"]] if rng.random() < 0.6 else [sizes["B"], sizes["S"]]
        elif letter.endswith("?"):
            shape.append(rng.choice((1, sizes[letter[:-1]])))
        else:
            shape.append(int(letter) if letter.isdigit() else sizes[letter])
    if name in ("x", "qkv", "image", "residual"):
        shape[0] = min(shape[0], 8) if shape[0] < 100 else shape[0]
    scale = 1 / max(1, shape[-1]) ** 0.5 if name.endswith("weight") and len(shape) > 1 else 1.0
    mixes = dtype in ("float32", "bfloat16") and rng.random() < 0.1
    return Odd(
        tuple(shape),
        rng.choice(("float32", "bfloat16")) if mixes else dtype,
        rng.choice(odd.LAYOUTS) if rng.random() < 0.5 else "packed",
        rng.choice(odd.VALUES) if rng.random() < 0.15 else "normal",
        seed=rng.randrange(2**31),
        scale=scale,
    )


def numbers(rng: random.Random, signature: dict, sizes: dict) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in signature:
        if name.endswith("_p"):
            found[name] = rng.choice(PROBABILITIES)
    if "seed" in signature:
        found["seed"] = Seed(rng.choice(SEEDS))
    for name, choices in {"eps": EPS, "scale": SCALES, "activation": ACTIVATIONS}.items():
        if name in signature:
            found[name] = rng.choice(choices)
    return found


class Seed(int):
    """A seed tensor to be."""

    def make(self) -> Tensor:
        return torch.tensor([int(self)])


class Offsets(list):
    """An offsets tensor to be."""

    def make(self) -> Tensor:
        return torch.tensor(list(self), dtype=torch.int32)


def offsets(rng: random.Random, S: int) -> Offsets:
    S = min(S, 2**31 - 1)
    inner = sorted(rng.randint(0, S) for _ in range(rng.choice((0, 1, 2, 5))))
    return Offsets([0, *inner, S])


# ---- something broken ----


def _some_tensor(rng: random.Random, arguments: dict) -> tuple[str, Odd] | None:
    names = [name for name, value in arguments.items() if isinstance(value, Odd)]
    if not names:
        return None
    name = rng.choice(names)
    return name, arguments[name]


def break_shape(rng: random.Random, op: Operator, arguments: dict) -> None:
    found = _some_tensor(rng, arguments)
    if found is None:
        return
    shape = list(found[1].shape)
    change = rng.randrange(5)
    if change == 0 and shape:
        shape[rng.randrange(len(shape))] += rng.choice((-1, 1))
    elif change == 1 and shape:
        shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2))
    elif change == 2:
        shape.insert(rng.randrange(len(shape) + 1), 1)
    elif change == 3 and shape:
        shape.pop(rng.randrange(len(shape)))
    else:
        shape = [rng.choice((0, 1, 3)) for _ in range(rng.randrange(7))]
        if 0 in shape and rng.random() < 0.5:
            shape[shape.index(0) - 1] = rng.choice(odd.HUGE[:2]) if len(shape) > 1 else 0
    found[1].shape = tuple(max(0, n) for n in shape)


def break_dtype(rng: random.Random, op: Operator, arguments: dict) -> None:
    found = _some_tensor(rng, arguments)
    if found is not None:
        found[1].dtype = rng.choice(odd.DTYPES)


def break_device(rng: random.Random, op: Operator, arguments: dict) -> None:
    every = rng.random() < 0.5
    for value in arguments.values():
        if isinstance(value, Odd) and (every or rng.random() < 0.3):
            value.device = "meta"


def break_layout(rng: random.Random, op: Operator, arguments: dict) -> None:
    found = _some_tensor(rng, arguments)
    if found is not None:
        found[1].layout = rng.choice(odd.FOREIGN_LAYOUTS)


def break_value(rng: random.Random, op: Operator, arguments: dict) -> None:
    """A number out of range, None for a tensor, or another kind of object."""
    name = rng.choice(list(inspect.signature(getattr(ops, op.name)).parameters))
    if name.endswith("_p"):
        arguments[name] = rng.choice(BAD_PROBABILITIES)
    elif name == "activation":
        arguments[name] = rng.choice(BAD_ACTIVATIONS)
    elif name == "offsets":
        S = 5
        wrong = [[0, S + 1], [0, 3, 1, S], [-1, S], [0], [], [0, 2**31 - 1], [1, S], [[0, S]]]
        arguments[name] = Offsets(rng.choice(wrong))
    elif name == "seed":
        shape = rng.choice(((), (0,), (2,), (1,), (1, 1)))
        arguments[name] = Odd(shape, rng.choice(("int64", "int32", "float32", "bool")))
    elif name in ("eps", "scale"):
        arguments[name] = odd.number(rng)
    else:
        arguments[name] = rng.choice((None, None, 3, "x", [1.0], torch.nn.Identity()))


BREAKS = (
    break_shape, break_shape, break_dtype, break_device, break_layout, break_value, break_value,
)  # fmt: skip


# ---- the call ----


def call(op: Operator, arguments: dict[str, object], threads: int) -> str:
    torch.set_num_threads(threads)
    given = {k: v.make() if hasattr(v, "make") else v for k, v in arguments.items()}
    try:
        y = getattr(ops, op.name)(**given)
        grads = gradients(y, given)
    except Exception as error:
        if judge(error) != REFUSED:
            raise
        return REFUSED
    if comparable(given):
        compare(op, given, y, grads)
    return OK


def comparable(given: dict[str, object]) -> bool:
    """Not where a mask may meet NaN or Inf: whether 0 * NaN is dropped or kept is no promise.

    A softmax that divides by its row's sum at the end makes NaN of what its definition drops, and
    so do gradients that are masked before they are multiplied.
    """
    tensors = [t for t in given.values() if isinstance(t, Tensor) and t.is_floating_point()]
    masked = any(p for name, p in given.items() if name.endswith("_p")) or leaves(given)
    scale = given.get("scale") or 0
    return not masked or (
        abs(scale) < 1e6 and all(t.device.type == "meta" or is_tame(t) for t in tensors)
    )


def is_tame(t: Tensor) -> bool:
    """Neither NaN nor so large that a product of two overflows."""
    return bool((odd.plain(t).float().abs() < 1e6).all())


def leaves(given: dict[str, object]) -> dict[str, Tensor]:
    return {k: v for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad}


def gradients(y: Tensor, given: dict[str, object]) -> dict[str, Tensor | None]:
    """Of a weighted sum of y, by argument."""
    wanted = leaves(given)
    if not (wanted and y.requires_grad and y.numel()) or y.device.type == "meta":
        return {}
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, list(wanted.values()), weights, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def compare(op: Operator, given: dict, y: Tensor, grads: dict[str, Tensor | None]) -> None:
    if y.device.type == "meta":
        return
    results = []
    for dtype in (None, torch.float64):
        plain = {name: odd.plain(value) for name, value in given.items()}
        if dtype is not None:
            for name, value in plain.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    plain[name] = value.detach().to(dtype).requires_grad_(value.requires_grad)
        try:
            defined = op.reference(*schema_order(op, plain))[0]
            results.append((defined, gradients(defined, plain)))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise Wrong(f"a result where the reference refuses: {reason}") from None
    (torchs, torch_grads), (truth, true_grads) = results
    check_close(y, torchs, truth, "y")
    for name, grad in grads.items():
        if grad is not None and torch_grads.get(name) is not None:
            check_close(grad, torch_grads[name], true_grads[name], f"gradient of {name}")


def schema_order(op: Operator, given: dict[str, object]) -> list[object]:
    """What the reference takes: the public function's defaults, and no saved results."""
    parameters = inspect.signature(getattr(ops, op.name)).parameters
    values = {name: p.default for name, p in parameters.items()} | given | {"save": False}
    if op.name == "attention" and values["scale"] is None:
        values["scale"] = (values["qkv"].shape[-1] or 1) ** -0.5
    for name in {"eps", "scale"} & values.keys():
        values[name] = float(values[name])  # as the schema does with an int
    return [values[name] for name in op.arguments]
