"""What is timed on a CPU, by whom, and which class of machines the results belong to."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from .. import cpu
from ..precision import PRECISIONS

# From the instruction set: class -> (its name in words, flags of the CPU that it needs). The first
# one that fits is the machine's. AVX-VNNI tells the CPUs of which two units multiply 512 bits (Zen
# 5, AMX's without AMX) from those that multiply 512 in two halves (Zen 4).
CLASSES = {
    "amx_fp16": ("AMX with fp16", "amx_tile amx_bf16 amx_fp16"),
    "amx": ("AMX", "amx_tile amx_bf16"),
    "avx512_wide": (
        "AVX-512 VNNI and bf16, 512 bits wide",
        "avx512f avx512_vnni avx512_bf16 avx_vnni",
    ),
    "avx512_bf16": ("AVX-512 VNNI and bf16", "avx512f avx512_vnni avx512_bf16"),
    "avx512_vnni": ("AVX-512 VNNI", "avx512f avx512_vnni"),
    "avx512": ("AVX-512", "avx512f"),
    "avx_vnni": ("AVX-VNNI", "avx2 avx_vnni"),
    "avx2": ("AVX2", "avx2 fma"),
    "portable": ("none of these instruction sets", ""),
}
_BF16_FLAGS = ("avx512_bf16", "amx_bf16")

NAMES = {
    "torch": "PyTorch",
    "compile": "torch.compile",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "native": "vitkern",
}
PEERS = tuple(name for name in NAMES if name != "native")
PEER_PRECISIONS = {
    "torch": ("fp32", "bf16"),
    "compile": ("fp32", "bf16"),
    "onnxruntime": ("fp32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
}
NO_BF16 = (
    "this CPU has no bf16 instructions: bf16 would be emulated, several times slower than fp32"
)

# Of the spacing of a precision's elements (vitkern.precision), relative to the logits' rms: two
# right results are about one apart after dozens of layers, and int8 is beyond four of bf16's.
ALLOWED = 4.0
COARSEST = 0.25  # of int8, where the table of precisions has none: beyond it logits mean little


class Case(NamedTuple):
    """A row of the published table: everybody takes turns in it."""

    name: str  # of the model
    batch: int
    size: int  # pixels of an image's side

    @property
    def text(self) -> str:
        return f"{self.name} batch {self.batch}, {self.size} px"

    @property
    def axes(self) -> dict[str, int]:
        return {"B": self.batch, "Y": self.size, "X": self.size}


# The most telling first: should somebody stop the run, those are there.
CASES = (
    Case("B/16", 1, 224),
    Case("B/16", 8, 224),
    Case("S/16", 8, 224),
    Case("B/16", 2, 384),
)
QUICK = (Case("B/16", 1, 224), Case("S/16", 8, 224))


class Contestant(NamedTuple):
    """Somebody at a precision; `why_not`: known beforehand not to be worth a turn here."""

    provider: str
    precision: str
    why_not: str = ""

    @property
    def text(self) -> str:
        return f"{NAMES[self.provider]} {self.precision}"


# The packages that a peer needs besides torch; torch.compile wants a C++ compiler, too.
NEEDS = {
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino": ("openvino",),
}


def missing(provider: str) -> list[str]:
    """The packages that a peer needs and that are not installed here."""
    wanted = NEEDS.get(provider, ())
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def contestants(flags: Mapping[str, bool]) -> list[Contestant]:
    """All peers at each of their precisions, then vitkern at each of its own.

    By precision: those of one library are not built at the same time, and share files.
    """
    bf16 = multiplies_bf16(flags)
    found = [
        Contestant(provider, precision, "" if bf16 or precision != "bf16" else NO_BF16)
        for precision in ("fp32", "bf16", "int8")
        for provider, offered in PEER_PRECISIONS.items()
        if precision in offered
    ]
    return found + [Contestant("native", precision) for precision in precisions()]


def multiplies_bf16(flags: Mapping[str, bool]) -> bool:
    """Whether this CPU has instructions for bf16: peers emulate it elsewhere."""
    return any(flags.get(flag) for flag in _BF16_FLAGS)


def precisions() -> list[str]:
    """All that vitkern's engine computes in here: tf32 is fp32 without AMX."""
    return [p for p in cpu.PRECISIONS if p != "tf32" or cpu.has_tiles(cpu.isa())]


def machine_class(flags: Mapping[str, bool]) -> str:
    """The best of CLASSES whose instructions this CPU has."""
    return next(
        name for name, (_, needs) in CLASSES.items() if all(flags.get(f) for f in needs.split())
    )


def allowed_error(precision: str) -> float:
    """The relative rms error that a precision's class of results may have."""
    known = PRECISIONS.get(precision)
    return ALLOWED * known.unit if known else COARSEST
