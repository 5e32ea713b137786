"""The fuzzers find every kind of fault, and none in vitkern; `make fuzz` looks longer."""

import pytest

pytest.importorskip("triton")  # the folders' and the launcher's cases
pytest.importorskip("PIL.Image")

from . import deliberate
from .__main__ import described
from .kinds import DELIBERATE, KINDS, make
from .outcome import FAULTS
from .runner import Limits, run_cases

SEED = 20
# Half a minute for all kinds on one slow core; native cases start the stand-in driver.
CASES = {"api": 60, "native": 60, "files": 45, "folders": 100}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_input_is_computed_or_refused(kind):
    results = run_cases(kind, SEED, range(CASES[kind]))
    faults = [result for result in results if result.outcome in FAULTS]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(map(described, faults[:10]))


@pytest.mark.full
def test_every_fault_is_seen_and_told():
    cases = range(len(deliberate.CASES))
    results = list(run_cases(DELIBERATE, SEED, cases, Limits(seconds=2)))
    got = {result.about: result.outcome for result in results}
    assert got == {function.__name__: want for function, want in deliberate.EXPECTED.items()}
    assert [(result.index, result.first) for result in results] == [(i, i) for i in cases]
    crash = described(results[deliberate.NAMES.index("crash")])
    assert "signal 11" in crash and "Segmentation fault" in crash
    assert f"python -m tests.fuzz --kind deliberate --seed {SEED} --case 0" in crash
    assert "in hang" in results[deliberate.NAMES.index("hang")].detail


def test_a_crash_is_blamed_on_the_case_that_caused_it():
    """One whose damage shows in a later case is replayed together with that."""
    cases = [deliberate.NAMES.index(name) for name in ("ok", "undermine", "ok", "fall")]
    *_, last = run_cases(DELIBERATE, SEED, cases)
    assert last.outcome == "crash" and last.index == cases[-1] and last.first == cases[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_made_of_its_number_alone(kind, tmp_path):
    once, again = ([make(kind, SEED, i, tmp_path / str(i)).about for i in range(6)] for _ in "ab")
    other = [make(kind, SEED + 1, i, tmp_path / str(i)).about for i in range(6)]
    assert once == again != other
