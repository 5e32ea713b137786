"""Launch lists: many launches by one call, with pointers that change each time, in graphs too."""

import threading

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.evidence.fake_cuda.kernels import load, values_of
from tests.threads import run_together
from vitkern import _C


class Twice:
    """y = affine(affine(x)) as a launch list, with x in slot 0 and y in slot 1."""

    def __init__(self, fake):
        self.bias, self.middle = torch.randn(48), torch.empty(6, 48)
        self.first = sample.affine_launch(torch.empty(6, 48), self.middle, self.bias)
        second = sample.affine_launch(self.middle, torch.empty(6, 48))
        driver, self.list = _C.Driver("cuda", fake.path), _C.LaunchList()
        self.kernel = load(fake, self.first, driver=driver)
        _, *rest = values_of(self.first)
        self.list.add(self.kernel, self.first.grid, [_C.Slot(0), *rest])
        middle, _, *rest = values_of(second)
        self.list.add(load(fake, second, driver=driver), second.grid, [middle, _C.Slot(1), *rest])

    def expected(self, x):
        return sample.affine_expected(sample.affine_expected(x, self.bias))


@pytest.fixture
def twice(fake):
    torch.manual_seed(0)
    return Twice(fake)


def test_runs_all_launches_with_the_slots_of_the_call(fake, twice):
    assert (twice.list.launches, twice.list.slots) == (2, 2)
    for _ in range(2):
        x, y = torch.randn(6, 48), torch.zeros(6, 48)
        twice.list.run(0, [x.data_ptr(), y.data_ptr()])
        torch.testing.assert_close(y, twice.expected(x))


def test_slots_have_offsets(fake):
    x, y = torch.randn(2, 6, 48), torch.zeros(6, 48)
    launch = sample.affine_launch(x[1], y)
    launches = _C.LaunchList()
    _, *rest = values_of(launch)
    launches.add(load(fake, launch), launch.grid, [_C.Slot(0, 6 * 48 * 4), *rest])
    launches.run(0, [x.data_ptr()])
    torch.testing.assert_close(y, sample.affine_expected(x[1]))


def test_only_launches_are_called(fake, twice):
    """A call that waits for the GPU, or that a capture forbids, would show in the journal."""
    x, y = torch.randn(6, 48), torch.zeros(6, 48)
    before = len(fake.journal())
    twice.list.run(0, [x.data_ptr(), y.data_ptr()])
    calls = [line for line in fake.journal()[before:] if line.startswith("cu")]
    context = ["cuCtxGetCurrent", "cuCtxPushCurrent_v2"], ["cuCtxPopCurrent_v2"]
    assert calls == [*context[0], "cuLaunchKernel", "cuLaunchKernel", *context[1]]


@pytest.mark.parametrize("slot", [0, 1])
def test_misaligned_slots_are_refused_before_anything_starts(fake, twice, slot):
    addresses = [torch.zeros(7, 48).data_ptr() for _ in range(2)]
    addresses[slot] += 4
    with pytest.raises(ValueError, match=r"starts 4 bytes after a multiple of 16.*clone"):
        twice.list.run(0, addresses)
    assert not fake.executed


def test_number_of_slots_is_checked(twice):
    for slots in ([], [4096], [4096] * 3):
        with pytest.raises(ValueError, match=f"has 2 slots, not {len(slots)}"):
            twice.list.run(0, slots)


def test_a_list_that_has_run_is_closed(fake, twice):
    x, y = torch.randn(6, 48), torch.zeros(6, 48)
    twice.list.run(0, [x.data_ptr(), y.data_ptr()])
    with pytest.raises(ValueError, match="has run cannot be added to"):
        twice.list.add(twice.kernel, twice.first.grid, values_of(twice.first))


def test_launches_are_checked_when_they_are_added(fake, twice):
    launches = _C.LaunchList()
    with pytest.raises(ValueError, match="takes 8 values, not 1"):
        launches.add(twice.kernel, (1, 1, 1), [4096])
    with pytest.raises(ValueError, match="no GPU starts a grid"):
        launches.add(twice.kernel, (0, 1, 1), values_of(twice.first))
    with pytest.raises(ValueError, match="cannot be slot -1"):
        launches.add(twice.kernel, (1, 1, 1), [_C.Slot(-1), *values_of(twice.first)[1:]])
    assert launches.launches == 0
    launches.run(0)  # of nothing


def test_a_list_has_one_device(fake):
    fake.reset(80, 80)
    x, y = torch.randn(6, 48), torch.zeros(6, 48)
    launch, launches = sample.affine_launch(x, y), _C.LaunchList()
    driver = _C.Driver("cuda", fake.path)
    launches.add(load(fake, launch, driver=driver), launch.grid, values_of(launch))
    with pytest.raises(ValueError, match="must be on one device"):
        other = load(fake, launch, driver=driver, device=1)
        launches.add(other, launch.grid, values_of(launch))


def test_failing_launch_is_named(fake, twice):
    x, y = torch.randn(6, 48), torch.zeros(6, 48)
    fake.fail("cuLaunchKernel", 700)
    with pytest.raises(_C.DriverError, match=r"starting kernel affine.*700.*restart the process"):
        twice.list.run(0, [x.data_ptr(), y.data_ptr()])
    assert fake.current_context() is None


def test_threads_share_a_list(fake):
    """Each call has its own slots, whatever the others do meanwhile."""
    example = torch.empty(6, 48), torch.empty(6, 48)
    launch = sample.affine_launch(*example)
    launches, calls = _C.LaunchList(), []
    _, _, *rest = values_of(launch)
    launches.add(load(fake, launch), launch.grid, [_C.Slot(0), _C.Slot(1), *rest])
    fake.pause(0.01)

    def work():
        for _ in range(5):
            x, y = torch.randn(6, 48), torch.zeros(6, 48)
            launches.run(0, [x.data_ptr(), y.data_ptr()])
            calls.append((x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    run_together(threads)
    assert len(calls) == 20
    for x, y in calls:
        torch.testing.assert_close(y, sample.affine_expected(x))


# ---- Graphs ----------------------------------------------------------------------


def test_a_list_is_captured_and_replayed(fake, twice):
    x, y = torch.randn(6, 48), torch.zeros(6, 48)
    with fake.context(0):
        stream = fake.stream()
        with fake.capturing(stream) as graph:
            twice.list.run(stream, [x.data_ptr(), y.data_ptr()])
            assert not fake.executed, "captured launches do not run"
        for _ in range(2):
            x.normal_()
            fake.replay(graph[0], stream)
            torch.testing.assert_close(y, twice.expected(x))


def test_stand_in_refuses_what_a_capture_forbids(fake, twice):
    """Otherwise the test above would show nothing."""
    x, y = torch.randn(6, 48), torch.zeros(6, 48)
    with fake.context(0):
        stream = fake.stream()
        with pytest.raises(AssertionError, match="the capture had failed"):
            with fake.capturing(stream):
                with pytest.raises(_C.DriverError, match=r"900.*run once before capturing"):
                    load(fake, twice.first)
        with pytest.raises(AssertionError, match="the capture had failed"):
            with fake.capturing(stream):
                with pytest.raises(_C.DriverError, match=r"906.*default stream"):
                    twice.list.run(0, [x.data_ptr(), y.data_ptr()])
