"""The GPU's cases under pytest: `pytest benchmarks/ --benchmark-only --device cuda`.

The same checks and the same turns as `vitkern bench --device cuda`; -k chooses among the cases.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu import contract, device, limits, tables
from benchmarks.gpu.cases import Case, Selection, cases
from benchmarks.gpu.competitors import GraphDiffers, NoKernels
from benchmarks.gpu.measure import measure

KIND = "gpu"


def params(selection: Selection) -> list:
    return [pytest.param(case, id=case.id) for case in cases(selection)]


@pytest.fixture(scope="session")
def verified(request: pytest.FixtureRequest, gpu, gpu_rows) -> dict:
    """The device's limits, once every selected case has passed its checks; else the end."""
    wanted = [item.callspec.params["case"] for item in request.session.items]
    try:
        contract.require_kernels(gpu.device)
        verdicts = [
            contract.verify(one, gpu.device)
            for one in contract.checks(wanted, gpu.device, gpu.selection)
        ]
    except (device.DeviceLost, NoKernels) as error:
        pytest.exit(str(error), returncode=1)
    complaint = contract.complaint(verdicts)
    if complaint:
        lines = [verdict.line() for verdict in verdicts if verdict.passed is False]
        pytest.exit("\n".join([f"FAILED: {complaint}", *lines]), returncode=1)
    measured = limits.row(gpu.device, list(gpu.selection.kept_precisions()), gpu.selection.quick)
    gpu_rows += [*(verdict.row() for verdict in verdicts), measured]
    return measured


def test_gpu(case: Case, benchmark, gpu, gpu_rows, verified) -> None:
    try:
        outcome = measure(case, gpu.device, gpu.selection, verified)
    except (device.DeviceLost, GraphDiffers) as error:
        pytest.exit(str(error), returncode=1)
    gpu_rows += [*outcome.rows, *outcome.skipped]
    assert not outcome.broken, outcome.broken
    if "native" not in outcome.samples:
        pytest.skip("; ".join(f"{row['provider']}: {row['why']}" for row in outcome.skipped))
    benchmark.pedantic(lambda: None, rounds=1)
    if not benchmark.disabled:  # its table shows the device's own times
        benchmark.stats.stats.data[:] = outcome.samples["native"]
        benchmark.group = f"{case.kind} {case.name}"
        benchmark.extra_info["all"] = tables.line(outcome.rows)
