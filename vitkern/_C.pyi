"""What csrc/bindings.cpp and csrc/cuda/bindings.cpp offer Python; a test compares the names.

Kernels take the instruction set's name ("" for the best there is) and the fields of their args
struct in csrc/cpu/kernels.hpp by keyword; tensors are addresses, 0 for none.
"""

from collections.abc import Sequence
from typing import Any, Final

class _Enum:
    __members__: dict[str, Any]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class DType(_Enum):
    f32: Final[DType]
    bf16: Final[DType]
    u8: Final[DType]
    i8: Final[DType]

class Precision(_Enum):
    fp32: Final[Precision]
    tf32: Final[Precision]
    bf16: Final[Precision]
    int8: Final[Precision]

class Activation(_Enum):
    none: Final[Activation]
    gelu: Final[Activation]
    gelu_tanh: Final[Activation]
    quick_gelu: Final[Activation]
    tanh: Final[Activation]

class Pool(_Enum):
    tokens: Final[Pool]
    token: Final[Pool]
    mean: Final[Pool]

# ---- CPU kernels, csrc/cpu/kernels.inc ----

def attention(isa: str, /, **fields: Any) -> None: ...
def calibrate(isa: str, /, **fields: Any) -> None: ...
def layernorm(isa: str, /, **fields: Any) -> None: ...
def linear_residual(isa: str, /, **fields: Any) -> None: ...
def mlp(isa: str, /, **fields: Any) -> None: ...
def norm_linear(isa: str, /, **fields: Any) -> None: ...
def patch_embed(isa: str, /, **fields: Any) -> None: ...

# ---- CPU engine ----

def engine_layout(isa: str, precision: Precision, /) -> int: ...
def operator_layout(isa: str, weight: DType, /) -> int: ...

class Packed:
    """A weight (N, K) in the panels of a layout; it never changes."""

    def __init__(self, layout: int, dtype: DType, data: int, N: int, K: int, /) -> None: ...
    def unpack(self, dtype: DType, data: int, /) -> bool: ...
    @property
    def layout(self) -> int: ...
    @property
    def panels(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...

class Engine:
    """A ViT's packed weights; forward() may run in several threads at once."""

    def __init__(self, isa: str, /, **config: Any) -> None: ...
    def set_matrix(
        self, name: str, dtype: DType, data: int, N: int, K: int, scales: int = 0
    ) -> None: ...
    def set_packed(self, name: str, matrix: Packed, /) -> None: ...
    def set_vector(self, name: str, data: int, n: int, /) -> None: ...
    def finish(self) -> None: ...
    def forward(self, **fields: Any) -> None: ...
    def forward_all(self, inputs: Sequence[dict[str, Any]], /) -> None: ...
    @property
    def classes(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Fingerprint:
    """A few elements of arrays: (address, bytes of an element, sizes, strides) of each."""

    def __init__(
        self, rows: Sequence[tuple[int, int, Sequence[int], Sequence[int]]], /
    ) -> None: ...
    def matches(self) -> bool: ...

def features() -> dict[str, Any]: ...
def isas() -> list[str]: ...
def operator_isas() -> list[str]: ...
def profile_steps(on: bool, /) -> dict[str, float]: ...
def arena_allocations() -> int: ...
def arena_trim() -> None: ...
def cpus() -> int: ...
def set_cpus(count: int, /) -> None: ...

class Grant:
    """Threads of a call, as a kernel asks for them; freed with it."""

    def __init__(self, wanted: int, /) -> None: ...
    @property
    def threads(self) -> int: ...

# ---- What is watched, csrc/watch.cpp ----

def unchanged(
    tables: tuple[Any, ...],
    entries: tuple[Any, ...],
    absent: tuple[Any, ...],
    empty: tuple[Any, ...],
    types: tuple[Any, ...],
) -> bool: ...

class Watch:
    """unchanged() for facts that are asked for again and again."""

    def holds(
        self,
        dicts: tuple[Any, ...],
        tables: tuple[Any, ...],
        entries: tuple[Any, ...],
        absent: tuple[Any, ...],
        empty: tuple[Any, ...],
        types: tuple[Any, ...],
    ) -> bool: ...

def reads(descriptor: Any, objects: tuple[Any, ...], expected: tuple[Any, ...]) -> bool: ...

class Places:
    """Where tensors of a class with DLPack's exchange API are, and what is there."""

    def __init__(self, kind: type, version: Any, tensors: tuple[Any, ...], /) -> None: ...
    def match(self, tensors: tuple[Any, ...], /) -> bool: ...

# ---- GPU launcher ----

class DriverError(RuntimeError): ...

def runs_on(binary: str, device: str) -> bool: ...

class Driver:
    """A GPU vendor's driver library, with the binaries loaded through it."""

    def __init__(self, api: str = "cuda", path: str = "") -> None: ...
    def device(self, ordinal: int) -> dict[str, Any]: ...
    @property
    def api(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def device_count(self) -> int: ...

class Slot:
    """A pointer that a plan's run() is given: slots[index] + offset bytes."""

    def __init__(self, index: int, offset: int = 0) -> None: ...

class Kernel:
    """One compiled kernel on one device; launch() may run in several threads."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        image: bytes,
        name: str,
        arch: str,
        num_warps: int,
        warp_size: int,
        shared: int,
        parameters: Sequence[tuple[str, str, bool]],
        hidden: int,
        _skip: set[str] = ...,
    ) -> None: ...
    def launch(
        self, grid: Sequence[int], stream: int, values: Sequence[int | float | Slot]
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> int: ...

class Variants:
    """Which binary serves a launch of one Triton kernel, by its arguments."""

    def __init__(self, tensor: type, parameters: str, device: int, /) -> None: ...
    def start(
        self,
        arguments: dict[str, Any],
        num_warps: int,
        num_stages: int,
        grid: Sequence[int],
        stream: int,
        /,
    ) -> bool: ...
    def add(
        self, arguments: dict[str, Any], num_warps: int, num_stages: int, kernel: Kernel, /
    ) -> None: ...

class LaunchList:
    """Launches that are checked and packed once; run() starts them all in one call."""

    def add(
        self, kernel: Kernel, grid: Sequence[int], values: Sequence[int | float | Slot]
    ) -> None: ...
    def run(self, stream: int, slots: Sequence[int] = ()) -> None: ...
    @property
    def launches(self) -> int: ...
    @property
    def slots(self) -> int: ...

class Graph:
    """A launch list as a CUDA graph; run() may be called in several threads."""

    def __init__(self, launches: LaunchList, slots: Sequence[int] = ()) -> None: ...
    def run(self, stream: int, slots: Sequence[int] = ()) -> None: ...
    @property
    def launches(self) -> int: ...
