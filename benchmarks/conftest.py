"""Options of the benchmark suite, the comparison in turns, and the results file."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping

import pytest
import torch

from benchmarks import machine, rows
from vitkern.cli.machine import describe, let_torch_run_bf16
from vitkern.cli.timing import Turns

# Seconds for all operator rows and all model rows together, by mode. A row gets its share; the few
# turns that every row takes at least make the heaviest ones longer.
BUSY = 0.5  # load average before the run above which its numbers deserve a warning
BUDGET = {"quick": (10, 10), "default": (80, 120), "full": (600, 900)}


MODE = pytest.StashKey[str]()
ROWS = pytest.StashKey[list]()
LOAD = pytest.StashKey[float]()
WRITTEN = pytest.StashKey[pathlib.Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vitkern benchmarks")
    group.addoption(
        "--quick", action="store_true", help="smallest shape of each operator, Ti/16 batch 1"
    )
    group.addoption(
        "--full", action="store_true", help="ten minutes for operators, fifteen for models"
    )
    group.addoption(
        "--results",
        type=pathlib.Path,
        metavar="FILE",
        help=f"where the rows go (default in benchmarks/results: {rows.LATEST.name} after a"
        f" complete run, {rows.PARTIAL.name} after a part of it)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick") and config.getoption("--full"):
        raise pytest.UsageError("--quick and --full contradict each other: give one")
    config.stash[MODE] = next(
        (m for m in ("quick", "full") if config.getoption(f"--{m}")), "default"
    )
    config.stash[ROWS] = []
    config.stash[LOAD] = round(os.getloadavg()[0], 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A benchmark module lists its cases as `cases(quick)`, each a pytest.param."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", metafunc.module.cases(metafunc.config.stash[MODE] == "quick"))


@pytest.fixture(scope="session", autouse=True)
def working_bf16() -> None:
    let_torch_run_bf16()


@pytest.fixture
def compare(benchmark, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Time providers in turns and keep a row of each; pytest-benchmark reports `native`.

    Every round lets the others take their turn in pedantic's untimed set-up, then times `native`.
    """
    mode, kind = request.config.stash[MODE], request.module.KIND
    peers = sum(
        item.module.KIND == kind for item in request.session.items if hasattr(item.module, "KIND")
    )
    seconds = BUDGET[mode][kind == "model"] / max(1, peers)

    def run(
        functions: Mapping[str, Callable[[], object]],
        name: str,
        axes: Mapping[str, int],
        dtype: str,
        *,
        flops: int,
        bytes_moved: int,
    ) -> None:
        if benchmark.disabled:
            for function in functions.values():
                function()
            return
        with torch.inference_mode():
            turns = Turns(functions)

            def others() -> None:
                for provider in functions:
                    if provider != "native":
                        turns.take(provider)
                turns.warm("native")

            benchmark.pedantic(functions["native"], setup=others, rounds=turns.rounds(seconds))
        turns.samples["native"] = list(benchmark.stats.stats.data)
        spreads = turns.spreads()
        eager_us = min(spreads[p].median for p in rows.EAGER if p in spreads)
        benchmark.group = f"{kind} {name}"
        for provider, spread in spreads.items():
            request.config.stash[ROWS].append(
                rows.row(
                    kind,
                    name,
                    axes,
                    dtype,
                    provider,
                    spread,
                    eager_us,
                    flops=flops,
                    bytes_moved=bytes_moved,
                    rounds=len(turns.samples[provider]),
                )
            )
            if provider != "native":
                benchmark.extra_info[f"{provider}_us"] = spread.median
        benchmark.extra_info["ratio"] = round(eager_us / spreads["native"].median, 3)

    return run


def is_complete(found: list[dict]) -> bool:
    """Whether every case has its row: a part of the suite must not replace the published rows."""
    from benchmarks import test_models, test_operators

    cases = [*test_operators.cases(quick=False), *test_models.cases(quick=False)]
    return sum(row["provider"] == "native" for row in found) == len(cases)


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash[ROWS]
    if not found:
        return
    path = session.config.getoption("--results")
    path = path or (rows.LATEST if is_complete(found) else rows.PARTIAL)
    quick = session.config.stash[MODE] == "quick"
    limits = machine.limits(seconds=0.05 if quick else 0.5)
    rows.write(path, [*found, limits], {**describe(), "load_before": session.config.stash[LOAD]})
    session.config.stash[WRITTEN] = path


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Every row beside eager PyTorch, and where the rows went."""
    found = [r for r in config.stash[ROWS] if r["provider"] == "native"]
    if WRITTEN not in config.stash:
        return
    terminalreporter.section(
        "vitkern, and its speed relative to the fastest eager PyTorch timed in turns with it"
    )
    for r in found:
        label = f"{r['name']:<26} {rows.shape_text(r['axes']):<32} {r['dtype']:<9}"
        terminalreporter.write_line(f"{label} {r['us']:>12.1f} us {r['ratio']:>7.2f}x")
    if config.stash[LOAD] > BUSY:
        terminalreporter.write_line(
            f"warning: load average {config.stash[LOAD]} before the run: repeat it when quiet",
            yellow=True,
        )
    terminalreporter.write_line(f"{len(config.stash[ROWS])} rows in {config.stash[WRITTEN]}")
    terminalreporter.write_line(
        f"draw and tabulate them: python -m benchmarks.report {config.stash[WRITTEN]}"
    )
