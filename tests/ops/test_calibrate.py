"""The machine's own limits, measured by every instruction set."""

import time

import pytest
import torch

from vitkern import cpu


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("precision", cpu.PRECISIONS)
def test_multiply_rate_is_that_of_a_cpu(isa, precision):
    rate = cpu.calibrate(precision, seconds=0.002, isa=isa)
    assert 1e8 < rate < 1e14 * torch.get_num_threads()


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("numbers", [64 * 1024, 1_000_003])
def test_read_rate_is_that_of_a_memory(isa, numbers):
    rate = cpu.calibrate(data=torch.ones(numbers), seconds=0.002, isa=isa)
    assert 1e8 < rate < 1e13 * torch.get_num_threads()


def test_time_is_about_what_was_asked():
    start = time.perf_counter()
    cpu.calibrate(seconds=0.05)
    assert 0.05 <= time.perf_counter() - start < 20, "asked for a twentieth of a second"


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="precision is 'int4'"):
        cpu.calibrate("int4")
    with pytest.raises(ValueError, match="contiguous float32"):
        cpu.calibrate(data=torch.ones(8, 64).mT)
    with pytest.raises(ValueError, match="too few"):
        cpu.calibrate(data=torch.ones(3))
