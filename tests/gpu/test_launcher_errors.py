"""Objects and numbers that only a mistake or an attack hands to the launcher: errors, no crash."""

import copy

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.evidence.fake_cuda.kernels import load, values_of
from vitkern import _C

HUGE = [2**31, 2**63, 2**64, 2**70, -1, -(2**31) - 1, -(2**63) - 1]
OTHERS = [None, "1", 1.5, b"1", [], {}, object(), torch.zeros(1)]


@pytest.fixture
def launch():
    x, bias, y = sample.affine_operands()
    return sample.affine_launch(x, y, bias)


def unmade(kind):
    return kind.__new__(kind)


# ---- Objects -----------------------------------------------------------------------


USES = {
    "Driver": [
        lambda d: d.api, lambda d: d.path, lambda d: d.device_count, lambda d: d.device(0),
    ],
    "Kernel": [
        lambda k: k.name, lambda k: k.device, lambda k: k.launch((1, 1, 1), 0, []),
        lambda k: _C.LaunchList().add(k, (1, 1, 1), []),
    ],
    "LaunchList": [
        lambda p: p.launches, lambda p: p.slots, lambda p: p.run(0),
        lambda p: p.add(unmade(_C.Kernel), (1, 1, 1), []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", USES)
def test_objects_without_init_are_refused(kind):
    for use in USES[kind]:
        with pytest.raises(TypeError, match="was made without __init__: call its class"):
            use(unmade(getattr(_C, kind)))


def test_arguments_without_init_are_refused(fake, launch):
    kernel = load(fake, launch)
    with pytest.raises(TypeError, match="this Slot was made without __init__"):
        kernel.launch(launch.grid, 0, [unmade(_C.Slot), *values_of(launch)[1:]])
    with pytest.raises(TypeError, match="this Driver was made without __init__"):
        load(fake, launch, driver=unmade(_C.Driver))


def test_subclasses_without_init_are_refused():
    class Two(_C.Slot, _C.LaunchList):
        def __init__(self):
            _C.Slot.__init__(self, 0)

    with pytest.raises(TypeError, match="__init__"):
        Two()
    with pytest.raises(TypeError, match="this Two was made without __init__"):
        print(unmade(Two).launches)


def test_a_second_init_changes_nothing(fake, launch):
    launches = _C.LaunchList()
    launches.add(load(fake, launch), launch.grid, values_of(launch))
    launches.__init__()
    assert launches.launches == 1


@pytest.mark.parametrize("make", [_C.LaunchList, lambda: _C.Slot(0)], ids=["LaunchList", "Slot"])
def test_objects_are_not_copied(make):
    with pytest.raises(TypeError):
        copy.copy(make())


def test_none_is_no_kernel_and_no_driver(launch):
    with pytest.raises(ValueError, match="a launch list is made of kernels, not of None"):
        _C.LaunchList().add(None, (1, 1, 1), [])
    image = sample.image_of(launch.variant, "sm_80")
    with pytest.raises(ValueError, match="a kernel needs a driver, not None"):
        _C.Kernel(None, 0, image, "affine", "sm_80", 4, 32, 0, [], 2)


# ---- Numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("field", ["num_warps", "warp_size", "shared"])
def test_impossible_blocks_are_refused(fake, launch, field):
    for value in (*HUGE, 2**26, 2**30, 2**31 - 1, 10**30):
        with pytest.raises((ValueError, TypeError), match=r"block|incompatible constructor"):
            load(fake, launch, **{field: value})
    if field != "shared":
        with pytest.raises(ValueError, match=r"a block of .* is impossible"):
            load(fake, launch, **{field: 0})
    for value in OTHERS[:-1]:
        with pytest.raises(TypeError):
            load(fake, launch, **{field: value})


def test_products_beyond_32_bits_are_no_blocks(fake, launch):
    """2^16 warps of 2^16 threads are 0 threads in 32 bits."""
    with pytest.raises(ValueError, match="65536 warps of 65536 threads is impossible"):
        load(fake, launch, num_warps=2**16, warp_size=2**16)


@pytest.mark.parametrize("number", [-1, -(2**31), 2**31, 2**64, None, "0", 0.0])
def test_impossible_devices_are_refused(fake, launch, number):
    driver = _C.Driver("cuda", fake.path)
    with pytest.raises((ValueError, TypeError), match=r"numbered from 0|incompatible"):
        driver.device(number)
    with pytest.raises((ValueError, TypeError), match=r"numbered from 0|incompatible"):
        load(fake, launch, device=number)


@pytest.mark.parametrize("name", ["", "affine\0", "\0"], ids=repr)
def test_names_that_c_cannot_hold_are_refused(fake, launch, name):
    with pytest.raises(ValueError, match="at least one character, and no zero"):
        load(fake, launch, name=name)


GRIDS = [(), (1,), (1, 1), (1, 1, 1, 1), None, 1, "111", (1.5, 1, 1), (None, 1, 1), (2**64, 1, 1)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grids_of_other_kinds_are_refused(fake, launch, grid):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        load(fake, launch).launch(grid, 0, values_of(launch))


@pytest.mark.parametrize("stream", [-1, 2**64, None, "0", 0.0])
def test_streams_of_other_kinds_are_refused(fake, launch, stream):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        load(fake, launch).launch(launch.grid, stream, values_of(launch))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _C.LaunchList().run(stream)


def test_values_of_other_kinds_are_refused(fake, launch):
    kernel = load(fake, launch)
    for value in OTHERS[:2] + OTHERS[3:]:
        with pytest.raises(TypeError, match="values are ints"):
            kernel.launch(launch.grid, 0, [value, *values_of(launch)[1:]])
    for values in (None, 3, {1, 2}, iter([])):
        with pytest.raises(TypeError):
            kernel.launch(launch.grid, 0, values)
    assert not fake.executed


class Made:
    """A sequence whose items exist only while they are looked at."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        value = self.values[i]
        return value + 0 if isinstance(value, (int, float)) else value


def test_values_may_be_made_on_demand(fake, launch):
    load(fake, launch).launch(launch.grid, 0, Made(values_of(launch)))
    assert len(fake.executed) == 1


# ---- Slots -------------------------------------------------------------------------


@pytest.fixture
def list_with(fake, launch):
    def make(slot):
        launches = _C.LaunchList()
        launches.add(load(fake, launch), launch.grid, [slot, *values_of(launch)[1:]])
        return launches

    return make


@pytest.mark.parametrize("index, offset", [(-1, 0), (1024, 0), (2**63 - 1, 0), (0, -1)])
def test_impossible_slots_are_refused(list_with, index, offset):
    with pytest.raises(ValueError, match=rf"x .* cannot be slot {index} \+ {offset}"):
        list_with(_C.Slot(index, offset))


@pytest.mark.parametrize("numbers", [(2**63,), (0, 2**63), (None,), (0.5,), ("0",), ()])
def test_slots_are_two_numbers(numbers):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _C.Slot(*numbers)


@pytest.mark.parametrize("address", [0, -16, 16, 2**63 - 16])
def test_impossible_addresses_are_refused(fake, list_with, address):
    """2^63 - 16 + 32 is negative in 64 bits."""
    launches = list_with(_C.Slot(0, 32))
    with pytest.raises(ValueError, match=r"parameter x .*cannot be"):
        launches.run(0, [address])
    assert not fake.executed
