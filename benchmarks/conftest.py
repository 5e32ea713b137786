"""Options of the benchmark suite, the comparison in turns, and the results file."""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch

from benchmarks import machine, rows
from benchmarks.gpu import device as gpu_device
from benchmarks.gpu.cases import Selection
from benchmarks.gpu.cases import cases as gpu_cases
from benchmarks.gpu.publish import destination, publish
from vitkern import cpu
from vitkern.cli.bench import GPU_OPTIONS
from vitkern.measure.machine import describe, let_torch_run_bf16
from vitkern.measure.timing import LONG_CALL_S, Turns

BUSY = 0.5  # load average before the run above which its numbers deserve a warning
# Seconds for all rows of a kind together, by mode. A row gets its share; the few turns that every
# row takes at least make the heaviest ones longer.
BUDGET = {
    "quick": {"op": 10, "model": 10, "scaling": 1},
    "default": {"op": 80, "model": 120, "scaling": 100},
    "full": {"op": 600, "model": 900, "scaling": 900},
}
# The machine's own multiply rate, between a row's turns: it can fall for seconds at a time on a
# shared host, and a share of it means more than a time. Before every turn of a few rounds.
CALIBRATED_ROUNDS, CALIBRATION_S = 4, 0.003
SLOW = 2.0  # times the fastest eager provider's long call: such a peer cannot win the row

# Which file publishes rows of which kinds, once every case has its row.
PUBLISHED = {rows.LATEST: ("op", "model"), rows.SCALING: ("scaling", "memory")}

MODE = pytest.StashKey[str]()
ROWS = pytest.StashKey[list]()
LOAD = pytest.StashKey[float]()
WRITTEN = pytest.StashKey[dict]()  # file -> how many rows


class Gpu(NamedTuple):
    """The device of --device, and what of its suite is run."""

    device: gpu_device.Device
    selection: Selection


GPU = pytest.StashKey[Gpu]()
SAID = pytest.StashKey[list]()  # lines about the files of a GPU's run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vitkern benchmarks")
    group.addoption(
        "--quick", action="store_true", help="smallest shape of each operator, Ti/16 batch 1"
    )
    group.addoption(
        "--full", action="store_true", help="ten minutes for operators, fifteen for models"
    )
    group.addoption(
        "--scaling",
        action="store_true",
        help="also sweeps over batch, threads and image size, and memory: eight minutes more",
    )
    group.addoption(
        "--device",
        default="cpu",
        metavar="NAME",
        help="cpu (default), or cuda, cuda:1 (ROCm's too), which runs test_gpu.py and no other",
    )
    for option, settings in GPU_OPTIONS.items():
        group.addoption(option, **settings)
    group.addoption(
        "--results",
        "--output",
        type=pathlib.Path,
        metavar="FILE",
        help=f"where all rows go (default in benchmarks/results: {rows.LATEST.name} and"
        f" {rows.SCALING.name} after a complete run, {rows.PARTIAL.name} after a part of it)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick") and config.getoption("--full"):
        raise pytest.UsageError("--quick and --full contradict each other: give one")
    config.stash[MODE] = next(
        (m for m in ("quick", "full") if config.getoption(f"--{m}")), "default"
    )
    config.stash[ROWS] = []
    config.stash[LOAD] = round(os.getloadavg()[0], 2)
    if config.getoption("--device") != "cpu":
        try:
            selection = Selection.of(config.option)
            config.stash[GPU] = Gpu(gpu_device.open_device(config.getoption("--device")), selection)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """test_gpu.py for a GPU, the others for the CPU."""
    if collection_path.parent != pathlib.Path(__file__).parent or collection_path.suffix != ".py":
        return None
    return (collection_path.name == "test_gpu.py") != (GPU in config.stash) or None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A benchmark module lists its cases as `cases(quick)`, each a pytest.param."""
    if "gpu" in metafunc.fixturenames:
        selection = metafunc.config.stash[GPU].selection
        metafunc.parametrize("case", metafunc.module.params(selection))
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", metafunc.module.cases(metafunc.config.stash[MODE] == "quick"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--scaling"):
        longer = PUBLISHED[rows.SCALING]
        found = [i for i in items if getattr(getattr(i, "module", None), "KIND", "") in longer]
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if item not in found]


@pytest.fixture(scope="session", autouse=True)
def working_bf16() -> None:
    let_torch_run_bf16()


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> Gpu:
    return pytestconfig.stash[GPU]


@pytest.fixture(scope="session")
def gpu_rows(pytestconfig: pytest.Config) -> list[dict]:
    """The rows that the session writes."""
    return pytestconfig.stash[ROWS]


@pytest.fixture
def keep_row(request: pytest.FixtureRequest) -> Callable[[dict], None]:
    """Puts a row among those that the session writes."""
    return request.config.stash[ROWS].append


@pytest.fixture
def compare(benchmark, keep_row, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Time providers in turns and keep a row of each; pytest-benchmark reports `native`.

    Every round lets the others take their turn in pedantic's untimed set-up, then times `native`;
    in some rounds a calibration precedes each turn.
    """
    mode, kind = request.config.stash[MODE], request.module.KIND
    peers = sum(
        item.module.KIND == kind for item in request.session.items if hasattr(item.module, "KIND")
    )
    seconds = BUDGET[mode][kind] / max(1, peers)

    def run(
        functions: Mapping[str, Callable[[], object]],
        name: str,
        axes: Mapping[str, int],
        dtype: str,
        *,
        flops: int,
        bytes_moved: int,
        native_flops: int | None = None,
        precision: str = "",
        retire_slow: bool = False,
    ) -> None:
        if benchmark.disabled:
            for function in functions.values():
                function()
            return
        with torch.inference_mode():
            turns = Turns(functions)
            for provider in slow_peers(turns) if retire_slow else ():
                turns.retire(provider)
            rounds = turns.rounds(seconds)
            how = precision or rows.PRECISION[dtype]
            every, count, rates = -(-rounds // CALIBRATED_ROUNDS), itertools.count(), []

            def others() -> None:
                calibrated = next(count) % every == 0
                for provider in turns.once:  # native is the last
                    if calibrated:
                        rates.append(cpu.calibrate(how, seconds=CALIBRATION_S))
                    if provider != "native":
                        turns.take(provider)
                turns.warm("native")

            benchmark.pedantic(functions["native"], setup=others, rounds=rounds)
        turns.samples["native"] = list(benchmark.stats.stats.data)
        spreads = turns.spreads()
        eager_us = min(spreads[p].median for p in rows.EAGER if p in spreads)
        benchmark.group = f"{kind} {name}"
        for provider, spread in spreads.items():
            native = provider == "native"
            keep_row(
                rows.row(
                    kind,
                    name,
                    axes,
                    dtype,
                    provider,
                    spread,
                    eager_us,
                    flops=native_flops if native and native_flops else flops,
                    bytes_moved=bytes_moved,
                    rounds=len(turns.samples[provider]),
                    precision=precision,
                    multiply_gflops=round(statistics.median(rates) / 1e9, 1),
                )
            )
            if not native:
                benchmark.extra_info[f"{provider}_us"] = spread.median
        benchmark.extra_info["ratio"] = round(eager_us / spreads["native"].median, 3)

    return run


def slow_peers(turns: Turns) -> list[str]:
    """Eager providers whose first call, a long one, was far behind the fastest eager one's."""
    eager = {p: t for p, t in turns.once.items() if p in rows.EAGER}
    return [p for p, t in eager.items() if t > max(LONG_CALL_S, SLOW * min(eager.values()))]


def is_complete(found: list[dict]) -> bool:
    """Whether every case has its row: a part of the suite must not replace the published rows."""
    from benchmarks import test_memory, test_models, test_operators, test_scaling

    suites = (test_operators, test_models, test_scaling, test_memory)
    kinds = {row["kind"] for row in found}
    cases = [case for suite in suites if suite.KIND in kinds for case in suite.cases(quick=False)]
    return sum(row["provider"] == "native" for row in found) == len(cases)


def destinations(found: list[dict]) -> dict[pathlib.Path, list[dict]]:
    """Where rows go unless --results says so: what is complete is published, the rest is not."""
    going: dict[pathlib.Path, list[dict]] = {}
    for path, kinds in PUBLISHED.items():
        these = [row for row in found if row["kind"] in kinds]
        whole = {row["kind"] for row in these} == set(kinds) and is_complete(these)
        going.setdefault(path if whole else rows.PARTIAL, []).extend(these)
    return {path: these for path, these in going.items() if these}


def finish_gpu(session: pytest.Session, found: list[dict]) -> None:
    """All rows of a GPU go to one file, which is published when no case is missing or failed."""
    gpu, given = session.config.stash[GPU], session.config.getoption("--results")
    done = {
        (row.get("of", row["kind"]), row["name"], str(row["axes"]), row["precision"])
        for row in found
        if row["kind"] == "skipped" or "us" in row
    }
    whole = session.testsfailed == 0 and len(done) == len(gpu_cases(gpu.selection))
    path = destination(gpu.selection, whole, given)
    session.config.stash[SAID] = publish(found, gpu.device.facts(), gpu.device, path)
    session.config.stash[WRITTEN] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash[ROWS]
    if GPU in session.config.stash:
        if any("us" in row for row in found):
            finish_gpu(session, found)
        return
    if not found:
        return
    given = session.config.getoption("--results")
    going = {given: found} if given else destinations(found)
    quick = session.config.stash[MODE] == "quick"
    limits = machine.limits(seconds=0.05 if quick else 0.5)
    facts = {**describe(), "load_before": session.config.stash[LOAD]}
    for path, these in going.items():
        rows.write(path, [*these, limits], facts)
    session.config.stash[WRITTEN] = {path: len(these) for path, these in going.items()}


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Every row beside eager PyTorch, and where the rows went."""
    found = [r for r in config.stash[ROWS] if r.get("provider") == "native" and "us" in r]
    if WRITTEN not in config.stash:
        return
    terminalreporter.section(
        "vitkern, and its speed relative to the fastest eager PyTorch timed in turns with it"
    )
    for r in found:
        label = f"{r['name']:<26} {rows.shape_text(r['axes']):<32} {rows.precision(r):<5}"
        speed = f"{r['ratio']:>7.2f}x" if r["ratio"] else "      –"
        terminalreporter.write_line(f"{label} {r['us']:>12.1f} us {speed}")
    if config.stash[LOAD] > BUSY and GPU not in config.stash:
        terminalreporter.write_line(
            f"warning: load average {config.stash[LOAD]} before the run: repeat it when quiet",
            yellow=True,
        )
    for line in config.stash.get(SAID, []):
        terminalreporter.write_line(line)
    for path, count in config.stash[WRITTEN].items():
        terminalreporter.write_line(f"{count} rows in {path}")
    if config.stash[WRITTEN]:
        files = " ".join(str(path) for path in config.stash[WRITTEN])
        terminalreporter.write_line(f"draw and tabulate them: python -m benchmarks.report {files}")
