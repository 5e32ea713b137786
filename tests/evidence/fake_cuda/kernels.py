"""Two kernels that a launcher can get wrong in every way, with their binaries and manifests."""

from __future__ import annotations

import functools
import hashlib
import json

import torch
import triton
import triton.language as tl
from torch import Tensor

import vitkern
from vitkern import _C
from vitkern.gpu.compiler import input_of, target_of
from vitkern.gpu.configs import Row
from vitkern.gpu.launch import Launch, Recorder, Variant, cdiv, executing, launch

HIDDEN = 2  # parameters that the Triton of these tests appends to a kernel's own


@triton.jit(do_not_specialize=["M"])
def affine(
    x,  # (M, D) by rows
    bias,  # (D,) or None
    y,  # (M, D) fp32
    factor, M, D, x_stride, salt,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y = x * factor + bias + salt / 2**40: a parameter of every size, at every alignment."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BD)
    mask = (rows < M)[:, None] & (columns < D)[None, :]
    out = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    out = out.to(tl.float32) * factor + (salt >> 40).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + columns, mask=columns < D, other=0.0)[None, :]
    tl.store(y + rows[:, None] * D + columns[None, :], out, mask=mask)


@triton.jit
def matmul(a, b, y, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y (BM, BN) = a (BM, K) @ b (K, BN), whose stages take more than 48 KB of shared memory."""
    rows, columns, inner = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    out = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + start + inner[None, :])
        right = tl.load(b + (start + inner)[:, None] * BN + columns[None, :])
        out = tl.dot(left, right, out)
    tl.store(y + rows[:, None] * BN + columns[None, :], out)


def recorded(kernel, grid, row: Row, **arguments) -> Launch:
    with executing(Recorder("sm_80")) as recorder:
        launch(kernel, grid, row, writes=("y",), **arguments)
    return recorder.launches[0]


def affine_launch(
    x: Tensor, y: Tensor, bias: Tensor | None = None, factor: float = 0.5, num_warps: int = 4
) -> Launch:
    (M, D), row = x.shape, Row({"BM": 4, "BD": 64}, num_warps, 3, why="small")
    numbers = {"factor": factor, "M": M, "D": D, "x_stride": x.stride(0), "salt": 3 << 40}
    return recorded(affine, (cdiv(M, 4),), row, x=x, bias=bias, y=y, **numbers)


def affine_operands() -> tuple[Tensor, Tensor, Tensor]:
    """x (10, 48), bias and an empty y: D and the stride are multiples of 16, M is not."""
    torch.manual_seed(0)
    return torch.randn(10, 48), torch.randn(48), torch.zeros(10, 48)


def affine_expected(x: Tensor, bias: Tensor | None = None, factor: float = 0.5) -> Tensor:
    return x.float() * factor + 3 + (0 if bias is None else bias)


def matmul_launch(a: Tensor, b: Tensor, y: Tensor, num_stages: int = 3) -> Launch:
    row = Row({"BM": 128, "BN": 128, "BK": 64}, 8, num_stages, why="large")
    return recorded(matmul, (1,), row, a=a, b=b, y=y, K=a.shape[1])


def matmul_operands() -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    return a, b, torch.zeros(128, 128)


@functools.cache
def compiled(variant: Variant, arch: str):
    """Triton's result: .asm and .metadata."""
    target = target_of(arch)
    source, options = input_of(variant, target)
    return triton.compile(source, target=target, options=options)


def image_of(variant: Variant, arch: str) -> bytes:
    return compiled(variant, arch).asm["cubin" if arch.startswith("sm_") else "hsaco"]


def arguments_of(variant: Variant) -> list[tuple[str, str, bool]]:
    return [(n, kind, n in variant.divisible) for n, kind in variant.signature]


def values_of(launch: Launch) -> list[int | float]:
    return [v.data_ptr() if isinstance(v, Tensor) else v for v in launch.run_time().values()]


def load(fake, launch: Launch, arch: str = "sm_80", device: int = 0, driver=None, **changes):
    """The launch's kernel by its manifest, or with some of that changed."""
    variant = launch.variant
    image, metadata = image_of(variant, arch), compiled(variant, arch).metadata
    fake.register(image, variant.kernel, arguments_of(variant), dict(variant.constants))
    manifest = {
        "image": image,
        "name": metadata.name,
        "arch": arch,
        "num_warps": variant.num_warps,
        "warp_size": 32,
        "shared": metadata.shared,
        "parameters": arguments_of(variant),
        "hidden": HIDDEN,
    }
    driver = driver or _C.Driver("cuda", fake.path)
    return _C.Kernel(driver, device, **{**manifest, **changes})


def write_store(folder, launches: list[Launch], *archs: str) -> None:
    """A folder of binaries for these launches, as the ahead-of-time build makes it."""
    rows = []
    for arch in archs:
        for variant in dict.fromkeys(one.variant for one in launches):
            image, metadata = image_of(variant, arch), compiled(variant, arch).metadata
            suffix = "cubin" if arch.startswith("sm_") else "hsaco"
            file = f"{arch}/{metadata.name}-{hashlib.sha256(image).hexdigest()[:16]}.{suffix}"
            (folder / arch).mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(image)
            row = {
                "id": variant.name,
                "kernel": metadata.name,
                "arch": arch,
                "file": file,
                "sha256": hashlib.sha256(image).hexdigest(),
                "num_warps": variant.num_warps,
                "num_stages": variant.num_stages,
                "warp_size": 32 if arch.startswith("sm_") else 64,
                "shared": metadata.shared,
                "hidden_parameters": HIDDEN,
                "global_scratch": [getattr(metadata, "global_scratch_size", 0), 1],
                "profile_scratch": [metadata.profile_scratch_size, 1],
                "arguments": arguments_of(variant),
                "constants": dict(variant.constants),
            }
            rows.append(row)
    manifest = {"vitkern": vitkern.__version__, "triton": triton.__version__, "kernels": rows}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
