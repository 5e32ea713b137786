"""The fuzzers find every kind of fault, and none in vitkern; `make fuzz` looks longer."""

import functools

import pytest

pytest.importorskip("triton")  # the folders' and the launcher's cases
pytest.importorskip("PIL.Image")

from . import deliberate
from .__main__ import described
from .kinds import DELIBERATE, KINDS
from .outcome import FAULTS
from .runner import Limits, run_cases

SEED = 20
# A quarter of a minute for each kind on one slow core; native cases start the stand-in driver.
CASES = {"api": 330, "native": 300, "files": 300, "folders": 400}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_input_is_computed_or_refused(kind):
    results = run_cases(kind, SEED, range(CASES[kind]))
    faults = [result for result in results if result.outcome in FAULTS]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(map(described, faults[:10]))


@functools.cache
def deliberate_results():
    cases = range(len(deliberate.CASES))
    return list(run_cases(DELIBERATE, SEED, cases, Limits(seconds=4)))


@pytest.mark.parametrize("index", range(len(deliberate.CASES)), ids=lambda i: deliberate.NAMES[i])
def test_every_fault_is_seen(index):
    result = deliberate_results()[index]
    assert result.outcome == deliberate.EXPECTED[deliberate.CASES[index]], result.detail
    assert result.index == result.first == index and result.about == deliberate.NAMES[index]


def test_a_crash_is_blamed_on_the_case_that_caused_it():
    """One whose damage shows in a later case is replayed together with that."""
    cases = [deliberate.NAMES.index(name) for name in ("ok", "undermine", "ok", "fall")]
    *_, last = run_cases(DELIBERATE, SEED, cases)
    assert last.outcome == "crash" and last.index == cases[-1] and last.first == cases[0]


def test_a_report_tells_how_to_run_a_case_again():
    result = deliberate_results()[deliberate.NAMES.index("crash")]
    text = described(result)
    assert "signal 11" in text and "Segmentation fault" in text
    assert f"python -m tests.fuzz --kind deliberate --seed {SEED} --case {result.index}" in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_made_of_its_number_alone(kind, tmp_path):
    from .kinds import make

    once, again = ([make(kind, SEED, i, tmp_path / str(i)).about for i in range(6)] for _ in "ab")
    other = [make(kind, SEED + 1, i, tmp_path / str(i)).about for i in range(6)]
    assert once == again != other
