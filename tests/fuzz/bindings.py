"""vitkern._C's operators, called as no Python of vitkern's would: sizes, pointers and keywords.

Every address that is not null has real memory behind it, enough for the sizes that could be meant:
what must be refused is what can be seen to be wrong (no memory for it could exist, or none was
given), not a lie about how much there is.
"""

from __future__ import annotations

import pathlib
import random

import torch

from vitkern import _C

from . import odd
from .outcome import OK, REFUSED, Case, Wrong, refused

WIDE = 9  # the largest size of an axis that memory is laid out for
ELEMENTS = 2**22  # of every buffer: WIDE to the power of 6 axes, and then some
# More bytes than any machine has, or negative ones: these have to be seen.
IMPOSSIBLE = (-1, -(2**40), -(2**63), 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
NUMBERS = {
    "layernorm": ("M", "D", "x_stride"),
    "norm_linear": ("M", "K", "N", "x_stride"),
    "attention": (
        "B", "S", "H", "E", "sequences", "b_stride", "s_stride", "part_stride", "h_stride",
        "bias_b_stride", "bias_h_stride", "bias_s_stride",
    ),
    "linear_residual": ("B", "S", "K", "N", "x_stride", "residual_stride"),
    "mlp": ("B", "S", "D", "F", "x_stride"),
    "patch_embed": (
        "B", "C", "Y", "X", "py", "px", "D", "T", "b_stride", "c_stride", "y_stride", "x_stride",
    ),
}  # fmt: skip
POINTERS = {
    "layernorm": ("x", "weight", "bias", "y", "stats"),
    "norm_linear": ("x", "norm_weight", "norm_bias", "weight", "bias", "y", "stats", "pre"),
    "attention": ("qkv", "bias", "offsets", "y", "lse"),
    "linear_residual": ("x", "weight", "bias", "residual", "gamma", "y"),
    "mlp": (
        "x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias",
        "gamma", "y", "stats", "pre",
    ),
    "patch_embed": ("image", "weight", "bias", "prefix", "position", "mean", "std", "y"),
}  # fmt: skip
OTHERS = {
    "layernorm": ("dtype", "eps"),
    "norm_linear": ("x_dtype", "w_dtype", "packed", "eps", "activation"),
    "attention": ("dtype", "scale", "dropout"),
    "linear_residual": ("x_dtype", "w_dtype", "y_dtype", "packed", "dropout", "path"),
    "mlp": ("x_dtype", "w_dtype", "packed", "eps", "activation", "dropout", "path"),
    "patch_embed": ("image_dtype", "w_dtype", "packed", "dropout"),
}


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    if rng.random() < 0.12:
        return calibration(rng)
    name = rng.choice(list(NUMBERS))
    keywords = valid(rng, name)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        spoil(rng, name, keywords)
    isa = rng.choice(
        ("", "", "", "portable", "avx2", "avx512", "amx", "sse", "avx512\0", "x" * 999)
    )
    fields = {"threads", *NUMBERS[name], *POINTERS[name], *OTHERS[name]}
    threads = keywords.get("threads")
    about = f"_C.{name}({isa[:20]!r}, threads={threads!r}, {shown(keywords)})"

    def run() -> str:
        memory = torch.zeros(ELEMENTS)  # one for all: a result may overwrite the input
        given = {k: address(v, memory) for k, v in keywords.items()}
        if refused(lambda: getattr(_C, name)(isa, **given)):
            return REFUSED
        if given.keys() != fields:
            raise Wrong(
                f"keywords that are missing or unknown went through: {given.keys() ^ fields}"
            )
        return OK

    return Case(about, run)


class Memory(str):
    """An address to be: of the case's memory."""


def address(value: object, memory: torch.Tensor) -> object:
    return memory.data_ptr() if isinstance(value, Memory) else value


def shown(keywords: dict[str, object]) -> str:
    return ", ".join(f"{k}={str(v)[:40]}" for k, v in keywords.items() if k != "threads")


def valid(rng: random.Random, name: str) -> dict[str, object]:
    """Sizes, strides and pointers that fit each other."""
    sizes = {n: rng.choice((0, 1, 1, 2, 3, 5, 8, WIDE)) for n in NUMBERS[name]}
    if name == "patch_embed":
        sizes |= {"py": rng.choice((1, 2, 3)), "px": rng.choice((1, 2, 4))}
        sizes |= {"Y": sizes["py"] * rng.choice((1, 2)), "X": sizes["px"] * rng.choice((1, 3))}
    if name == "attention":
        sizes["sequences"] = 1
    for stride in (n for n in sizes if n.endswith("stride")):
        sizes[stride] = WIDE * (WIDE if name == "attention" else 1)
    if name == "attention":  # S tokens of three parts of H heads of E numbers
        sizes |= {"h_stride": WIDE, "part_stride": WIDE**2, "s_stride": 3 * WIDE**2}
        sizes |= {"b_stride": 3 * WIDE**3, "bias_s_stride": WIDE, "bias_h_stride": WIDE**2}
        sizes["bias_b_stride"] = WIDE**3
    keywords: dict[str, object] = {"threads": rng.choice((1, 2, 3)), **sizes}
    for pointer in POINTERS[name]:
        optional = pointer not in ("x", "qkv", "image", "weight", "residual", "y")
        optional = optional and not pointer.startswith("fc") and not pointer.startswith("norm_")
        absent = optional and (rng.random() < 0.4 or pointer in ("offsets", "std", "mean"))
        keywords[pointer] = 0 if absent else Memory("memory")
    for other in OTHERS[name]:
        keywords[other] = _other(rng, other)
    return keywords


def _other(rng: random.Random, name: str) -> object:
    if name.endswith("dtype"):
        return _C.DType.u8 if name == "image_dtype" and rng.random() < 0.3 else _C.DType.f32
    if name == "packed":
        return rng.random() < 0.3  # the memory is larger than any panels of these sizes
    if name == "activation":
        return rng.choice(list(_C.Activation.__members__.values()))
    if name in ("dropout", "path"):
        return rng.choice(((0, 0, 1.0), (7, 2**23, 2.0), (2**64 - 1, 2**24, 0.0)))
    return rng.choice((1e-6, 0.0, 1.0))


def spoil(rng: random.Random, name: str, keywords: dict[str, object]) -> None:
    """One thing that the binding or the kernel can see to be wrong."""
    what = rng.randrange(7)
    if what == 0:
        keywords.pop(rng.choice(list(keywords)), None)
    elif what == 1:
        keywords[rng.choice(("nonesuch", "isa_", "Threads"))] = 1
    elif what in (2, 3):
        keywords[rng.choice(NUMBERS[name])] = rng.choice(IMPOSSIBLE)
    elif what == 4:
        keywords[rng.choice(POINTERS[name])] = rng.choice((0, 0, 0, -1, 2**64, None, "x", 1.5))
    elif what == 5:
        keywords["threads"] = rng.choice((0, -1, -(2**31), 2**31, 1e3, None, "2"))
    else:
        other = rng.choice(OTHERS[name])
        keywords[other] = rng.choice((_enum(rng), odd.number(rng), odd.number(rng)))


def _enum(rng: random.Random) -> object:
    """A member of some enumeration, or a value that it does not have."""
    kind = rng.choice((_C.DType, _C.Activation, _C.Precision, _C.Pool))
    if rng.random() < 0.4:
        return rng.choice(list(kind.__members__.values()))
    try:
        return kind(rng.choice((3, 7, 99, -1, 2**31 - 1)))
    except (TypeError, ValueError):
        return 99


def calibration(rng: random.Random) -> Case:
    seconds = rng.choice((0.001, 0, -1, float("nan"), float("inf"), 1e300, 1e18, 2**63, None, "1"))
    threads = rng.choice((1, 2, 2, 0, -1, 2**31 - 1, 2**40))
    floats = rng.choice((0, 1, 1024, 4096, -1, 2**61, 2**63 - 1))
    data = rng.choice((0, Memory("memory")))
    rates = rng.choice((Memory("memory"), Memory("memory"), 0))
    precision = rng.choice((_C.Precision.fp32, _C.Precision.bf16, _enum(rng)))
    isa = rng.choice(("", "portable", "nonesuch"))
    given = {"seconds": seconds, "threads": threads, "floats": floats, "data": data}
    given |= {"rates": rates, "precision": precision}

    def run() -> str:
        memory = torch.zeros(ELEMENTS)
        keywords = {k: address(v, memory) for k, v in given.items()}
        return REFUSED if refused(lambda: _C.calibrate(isa, **keywords)) else OK

    return Case(f"_C.calibrate({isa!r}, {', '.join(f'{k}={v}' for k, v in given.items())})", run)
