"""vitkern._C's launcher and its graphs over the stand-in driver, with all that can be odd.

Only what can be seen to be wrong is wrong here: a size that lies about the memory behind a pointer
would be the kernel's fault on a GPU, and the interpreter's in this process.
"""

from __future__ import annotations

import functools
import pathlib
import random
from collections.abc import Callable

import torch

from tests.evidence.fake_cuda import FakeCuda, build
from tests.evidence.fake_cuda import kernels as sample
from vitkern import _C

from . import odd
from .bindings import IMPOSSIBLE
from .outcome import OK, REFUSED, Case, Wrong, judge, refused

LARGE = (*IMPOSSIBLE, 2**27, 2**31 - 1, 2**31, 2**32)
GRIDS = (
    (0, 1, 1), (-1, 1, 1), (1, 65536, 1), (2**31, 1, 1), (2**63 - 1, 1, 1), (2**64, 1, 1), (1, 1),
    (), (1, 1, 1, 1), (1.5, 1, 1), None, "abc", (None, 1, 1), (2**31 - 1, 65535, 65536),
)  # fmt: skip
POINTERS = 3  # of the sample's values, which come first
NAMES = ("", "nonesuch", "affine\0", "a" * 10000, "affine ", "\u00e9", None, 3, b"affine")
ARCHS = ("", "sm_", "sm_90", "sm_8", "sm_80a", "sm_99999999999999999999", "gfx942", "sm_-80", None)
PARAMETERS = (
    [], [("x", "*fp32", True)], [("x", "i8", True)] * 8, [("", "", False)], [("x", "*", True)] * 65,
    [("x", "fp32", True)] * 10000, [("x",)], None, "abc", [("x", "*fp32", None)], [(1, 2, 3)],
)  # fmt: skip


@functools.cache
def fake(scratch: pathlib.Path) -> FakeCuda:
    """The stand-in driver, built once for all processes of a campaign."""
    library = scratch / "libcuda.so.1"
    return FakeCuda(library if library.exists() else build("fake_cuda.cpp", library))


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    generator = rng.choice((drivers, kernels, kernels, launches, launches, plans, plans))
    about, do = generator(rng, folder.parent)

    def run() -> str:
        fake(folder.parent).reset(*rng.choice(((80,), (80, 80), (90,))))
        return do()

    return Case(about, run)


Made = tuple[str, Callable[[], str]]


def outcome_of(call: Callable[[], object]) -> str:
    return REFUSED if refused(call) else OK


def drivers(rng: random.Random, scratch: pathlib.Path) -> Made:
    apis = ("cuda", "cuda", "hip", "", "CUDA", "x" * 9999, None, 3)
    own = str(scratch / "libcuda.so.1")
    paths = (
        own,
        own,
        "",
        "nonesuch.so",
        __file__,
        str(scratch),
        "libm.so.6",
        "x\0y",
        "/" * 5000,
        3,
    )
    api, path, ordinal = (
        rng.choice(apis),
        rng.choice(paths),
        rng.choice((0, 1, 7, *LARGE, -5, None)),
    )

    def run() -> str:
        return outcome_of(lambda: _C.Driver(api, path).device(ordinal))

    return f"_C.Driver({str(api)[:20]!r}, {str(path)[-30:]!r}).device({ordinal})", run


def affine():
    x, bias, y = sample.affine_operands()
    return sample.affine_launch(x, y, bias), (x, bias, y)


def kernels(rng: random.Random, scratch: pathlib.Path) -> Made:
    """A kernel by a manifest with one or two facts changed."""
    changes: dict[str, object] = {}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(("image", "image", "name", "arch", "num_warps", "warp_size", "shared",
                           "parameters", "hidden", "_skip", "driver", "device"))  # fmt: skip
        choices = {
            "image": (Damage(rng.randrange(2**31)), b"", b"\x7fELF", None, "text"),
            "name": NAMES, "arch": ARCHS, "parameters": PARAMETERS,
            "_skip": ({"nonesuch"}, {"arch"}, {1}, None, "arch"),
            "driver": (None, 3), "device": (1, -1, 99, *LARGE),
        }  # fmt: skip
        changes[name] = rng.choice(choices.get(name, (0, -1, 3, 64, 1024, *LARGE)))
    words = ", ".join(f"{k}={str(v)[:60]}" for k, v in changes.items())

    def run() -> str:
        launch, _ = affine()
        given = dict(changes)
        if isinstance(given.get("image"), Damage):
            given["image"] = given["image"].of(sample.image_of(launch.variant, "sm_80"))
        outcome = outcome_of(lambda: kernel_of(scratch, launch, given))
        absurd = [n for n in ("num_warps", "warp_size", "shared") if int(given.get(n, 0)) >= 2**27]
        if outcome == OK and absurd and "_skip" not in given:
            raise Wrong(f"a kernel with {absurd[0]} = {given[absurd[0]]} was loaded")
        return outcome

    return f"_C.Kernel({words})", run


class Damage(int):
    """How a binary is spoilt: a seed."""

    def of(self, content: bytes) -> bytes:
        rng, damaged = random.Random(int(self)), bytearray(content)
        if rng.random() < 0.5:
            return bytes(damaged[: rng.randrange(len(damaged))])
        for _ in range(rng.choice((1, 4, 64))):
            damaged[rng.randrange(min(len(damaged), rng.choice((64, 2**30))))] = rng.randrange(256)
        return bytes(damaged)


def kernel_of(scratch: pathlib.Path, launch, changes: dict[str, object]):
    """`sample.load` with the driver and the device among what can be changed."""
    driver = _C.Driver("cuda", fake(scratch).path)
    if "driver" not in changes:
        return sample.load(fake(scratch), launch, driver=driver, **changes)
    kernel = sample.load(fake(scratch), launch, driver=driver)
    manifest = {"device": 0, "image": b"", "name": kernel.name, "arch": "sm_80", "num_warps": 4}
    manifest |= {"warp_size": 32, "shared": 0, "parameters": [], "hidden": 2}
    return _C.Kernel(**{**manifest, **changes})


def spoil_values(rng: random.Random, values: list) -> tuple[str, object]:
    """(what was done, the values): each is wrong in a way that the launcher can see."""
    i = rng.randrange(len(values))
    chance = rng.random()
    if chance < 0.2:
        return f"without value {i}", values[:i] + values[i + 1 :]
    if chance < 0.3:
        return "a value more", [*values, 1]
    if chance < 0.4:
        other = rng.choice((None, 3, "abcdefgh", {}, iter(values), {*values[-2:]}, b"12345678"))
        return f"{other!r:.30} for all values", other
    wrong = rng.choice((None, "x", 1j, b"", [], 2**63, 2**64, -(2**63) - 1, 10**30, _C.Slot(0),
                        _C.Slot(-1), _C.Slot(2**62), object()))  # fmt: skip
    if i < POINTERS:
        wrong = rng.choice((wrong, 8, 12, -16, values[i] + 4))
    kind = float if isinstance(values[i], int) else int
    wrong = rng.choice((wrong, wrong, kind(1), float("nan") if kind is float else True))
    return f"{wrong!r:.30} for value {i}", [*values[:i], wrong, *values[i + 1 :]]


def launches(rng: random.Random, scratch: pathlib.Path) -> Made:
    spoilt, seed = rng.random() < 0.6, rng.randrange(2**31)
    grid = rng.choice(GRIDS) if rng.random() < 0.3 else None
    stream = rng.choice((0, 0, 0, 0, -1, 2**64, None, "x"))

    def run() -> str:
        launch, (x, bias, y) = affine()
        kernel, values = kernel_of(scratch, launch, {}), sample.values_of(launch)
        if spoilt:
            values = spoil_values(random.Random(seed), values)[1]
        if refused(lambda: kernel.launch(grid or launch.grid, stream, values)):
            return REFUSED
        if not spoilt and grid is None:
            same_as_expected(y, sample.affine_expected(x, bias))
        return OK

    what = spoil_values(random.Random(seed), sample.values_of(affine()[0]))[0] if spoilt else ""
    return f"kernel.launch({what}, grid={grid}, stream={stream})", run


def same_as_expected(got: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.allclose(got, wanted, rtol=1e-5, atol=1e-5):
        raise Wrong(f"the kernel gave {got.flatten()[0]}, not {wanted.flatten()[0]}")


KINDS = ("add", "add", "slot", "run", "run", "graph", "None", "wrong", "launches", "grid")


def plans(rng: random.Random, scratch: pathlib.Path) -> Made:
    """Plans of none to three launches in any order of calls."""
    steps: list[tuple[str, object]] = []
    for _ in range(rng.randrange(1, 5)):
        step = rng.choice(KINDS)
        steps.append((step, rng.randrange(2**31)))
    return f"_C.LaunchList: {', '.join(name for name, _ in steps)}", lambda: follow(scratch, steps)


def follow(scratch: pathlib.Path, steps: list[tuple[str, int]]) -> str:
    launch, operands = affine()
    kernel, plan, outcome = kernel_of(scratch, launch, {}), _C.LaunchList(), OK
    for name, seed in steps:
        try:
            take(name, random.Random(seed), plan, kernel, launch, operands)
        except Exception as error:
            if judge(error) != REFUSED:
                raise
            outcome = REFUSED
    return outcome


def take(name: str, rng: random.Random, plan, kernel, launch, operands) -> None:
    """One call of a plan's."""
    (x, _, y), values, grid = operands, sample.values_of(launch), launch.grid
    if name in ("run", "graph"):
        pointers = (x.data_ptr(), y.data_ptr(), 0, -1, 8)
        slots = [rng.choice(pointers) for _ in range(rng.randrange(4))]
        slots = rng.choice((slots, slots, [x.data_ptr()], odd.number(rng)))
        (_C.Graph(plan, slots) if name == "graph" else plan).run(0, slots)
        return
    if name == "launches":
        assert plan.launches >= 0 and plan.slots >= 0
        return
    if name == "slot":
        index = rng.choice((0, 0, 1, 2, 2**20, 2**40, 2**62, 2**63 - 1))
        values[0] = _C.Slot(index, rng.choice((0, 16, 2**62)))
    if name == "wrong":
        values = spoil_values(rng, values)[1]
    plan.add(
        None if name == "None" else kernel, rng.choice(GRIDS) if name == "grid" else grid, values
    )
