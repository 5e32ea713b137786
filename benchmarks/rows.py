"""Rows of a results file: one JSON object a line, one measurement of one provider each."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterable, Mapping

from vitkern.bench.rows import commit
from vitkern.bench.rows import read as read_rows
from vitkern.bench.rows import write as write_rows
from vitkern.measure.timing import Spread

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).parent / "results"
LATEST = RESULTS / "latest.jsonl"  # what README and docs show
SCALING = RESULTS / "scaling.jsonl"  # sweeps and memory, which take longer: --scaling
CUDA = RESULTS / "cuda.jsonl"  # of a GPU: --device cuda
PARTIAL = RESULTS / "partial.jsonl"  # what a run over a part of the suite writes; not committed

# Providers that are eager PyTorch: the reference, PyTorch's own fused operator, timm's model, in
# rows of bf16 the reference in fp32, and on a GPU each backend of scaled_dot_product_attention.
EAGER = (
    "torch", "torch_math", "torch_fused", "timm", "torch_fp32", "sdpa_flash", "sdpa_efficient",
    "sdpa_cudnn",
)  # fmt: skip

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}  # of an operator on such tensors


def row(
    kind: str,
    name: str,
    axes: Mapping[str, int],
    dtype: str,
    provider: str,
    spread: Spread,
    eager_us: float | None,
    *,
    flops: int,
    bytes_moved: int,
    rounds: int,
    precision: str = "",
    multiply_gflops: float | None = None,
) -> dict[str, object]:
    """One measurement; `ratio` is the speed relative to the fastest eager provider of its turns.

    `multiply_gflops` is the machine's own rate of multiply-adds between those turns.
    """
    return {
        "kind": kind,
        "name": name,
        "axes": dict(axes),
        "dtype": dtype,
        "precision": precision or PRECISION[dtype],
        "provider": provider,
        "us": spread.median,
        "us_p20": spread.p20,
        "us_p80": spread.p80,
        "rounds": rounds,
        "gflops": round(flops / spread.median / 1e3, 2),
        "gbs": round(bytes_moved / spread.median / 1e3, 3),
        "flops": flops,
        "bytes": bytes_moved,
        "ratio": round(eager_us / spread.median, 3) if eager_us else None,
        "multiply_gflops": multiply_gflops,
    }


def precision(row: Mapping) -> str:
    """fp32, bf16, ...: how a row's matmuls were computed."""
    return row.get("precision") or PRECISION.get(row["dtype"], row["dtype"])


def stamped(rows: Iterable[Mapping], machine: Mapping[str, object]) -> list[dict]:
    """Every row with machine, commit and date."""
    stamp = {
        "machine": dict(machine),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    return [{**row, **stamp} for row in rows]


def write(path: pathlib.Path, rows: Iterable[Mapping], machine: Mapping[str, object]) -> None:
    """Stamp every row with machine, commit and date, and write the file whole."""
    write_rows(path, stamped(rows, machine))


def read(path: pathlib.Path) -> list[dict]:
    """The rows of a results file; the error names the file and line that is not one."""
    return read_rows(path, "run `pytest benchmarks/ --benchmark-only`")


def shape_text(axes: Mapping[str, int]) -> str:
    """Axes as the tables print them: `B8 S197 D768`."""
    return " ".join(f"{letter}{size}" for letter, size in axes.items())
