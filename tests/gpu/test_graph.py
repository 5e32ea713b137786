"""CUDA graphs that the launcher makes of its own launch lists: no copies, no second buffers."""

import gc
import threading

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.evidence.fake_cuda.kernels import load, values_of
from tests.threads import run_together
from vitkern import _C


class Chain:
    """y = affine(affine(affine(x))) as a launch list: x in slot 0 and y in slot 1."""

    def __init__(self, fake, device=0, driver=None):
        self.biases, between = torch.randn(3, 48), torch.empty(2, 6, 48)
        self.kept = between
        x, y = torch.empty(6, 48), torch.empty(6, 48)
        ends = [(x, between[0]), (between[0], between[1]), (between[1], y)]
        driver, self.list = driver or _C.Driver("cuda", fake.path), _C.LaunchList()
        for (a, b), bias in zip(ends, self.biases, strict=True):
            one = sample.affine_launch(a, b, bias)
            kernel = load(fake, one, driver=driver, device=device)
            values = values_of(one)
            values[0] = _C.Slot(0) if a is x else values[0]
            values[2] = _C.Slot(1) if b is y else values[2]
            self.list.add(kernel, one.grid, values)

    def expected(self, x):
        for bias in self.biases:
            x = sample.affine_expected(x, bias)
        return x


def tensors():
    return torch.randn(6, 48), torch.zeros(6, 48)


def places(*several):
    return [one.data_ptr() for one in several]


@pytest.fixture
def chain(fake):
    return Chain(fake)


def calls(fake, before):
    return [line for line in fake.journal()[before:] if line.startswith("cu") and "Ctx" not in line]


def test_runs_all_launches_in_order_with_the_slots_of_the_call(fake, chain):
    x, y = tensors()
    graph = _C.Graph(chain.list, places(x, y))
    assert graph.launches == 3 and not fake.executed
    for _ in range(3):
        x, y = tensors()
        graph.run(0, places(x, y))
        torch.testing.assert_close(y, chain.expected(x))
    assert len(fake.executed) == 9


def test_what_did_not_move_is_not_written_again(fake, chain):
    x, y = tensors()
    graph = _C.Graph(chain.list, places(x, y))
    update, start = "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"
    other = torch.zeros(6, 48)
    for result, updates in ((y, 0), (other, 1), (other, 0)):
        before = len(fake.journal())
        graph.run(0, places(x, result))
        assert calls(fake, before) == ["cuStreamIsCapturing", *[update] * updates, start]
        torch.testing.assert_close(result, chain.expected(x))


def test_a_graph_replaces_its_launches(fake, chain):
    x, y = tensors()
    before = len(fake.journal())
    _C.Graph(chain.list, places(x, y)).run(0, places(x, y))
    assert "cuLaunchKernel" not in calls(fake, before)
    assert fake.current_context() is None


@pytest.mark.parametrize("slot", [0, 1])
def test_wrong_slots_are_refused_before_anything_starts(fake, chain, slot):
    x, y = tensors()
    graph = _C.Graph(chain.list, places(x, y))
    wrong = places(torch.zeros(7, 48), torch.zeros(7, 48))
    wrong[slot] += 4
    for call in (lambda: graph.run(0, wrong), lambda: _C.Graph(chain.list, wrong)):
        with pytest.raises(ValueError, match="starts 4 bytes after a multiple of 16"):
            call()
    with pytest.raises(ValueError, match="has 2 slots, not 1"):
        graph.run(0, [4096])
    assert not fake.executed
    graph.run(0, places(x, y))
    torch.testing.assert_close(y, chain.expected(x))


def test_a_list_with_a_graph_is_closed(fake, chain):
    _C.Graph(chain.list, places(*tensors()))
    one = sample.affine_launch(*tensors())
    with pytest.raises(ValueError, match="has run cannot be added to"):
        chain.list.add(load(fake, one), one.grid, values_of(one))


def test_a_graph_of_nothing_is_refused():
    for nothing in (_C.LaunchList(), None):
        with pytest.raises((ValueError, TypeError), match=r"a graph is made of launches|NoneType"):
            _C.Graph(nothing)


@pytest.mark.parametrize(
    "call", ["cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags"]
)
def test_a_graph_that_cannot_be_made_leaves_nothing(fake, chain, call):
    x, y = tensors()
    made = fake.library.fake_graphs()
    fake.fail(call, 2)
    with pytest.raises(_C.DriverError, match=f"making a graph.*{call}.*Free GPU memory"):
        _C.Graph(chain.list, places(x, y))
    assert fake.library.fake_graphs() == made and fake.current_context() is None
    chain.list.run(0, places(x, y))
    torch.testing.assert_close(y, chain.expected(x))


def test_an_update_that_fails_is_made_again(fake, chain):
    x, y = tensors()
    graph = _C.Graph(chain.list, places(x, y))
    x, y = tensors()
    fake.fail("cuGraphExecKernelNodeSetParams_v2", 910)
    with pytest.raises(_C.DriverError, match=r"changing a graph's addresses.*910"):
        graph.run(0, places(x, y))
    graph.run(0, places(x, y))
    torch.testing.assert_close(y, chain.expected(x))


def test_graphs_are_freed(fake, chain):
    gc.collect()
    before = fake.library.fake_graphs()
    graph = _C.Graph(chain.list, places(*tensors()))
    assert fake.library.fake_graphs() == before + 1
    del graph
    assert fake.library.fake_graphs() == before


def test_threads_share_a_graph(fake):
    """Each call has its own slots, whatever the others do meanwhile."""
    one = sample.affine_launch(*tensors())
    launches, done = _C.LaunchList(), []
    _, _, *rest = values_of(one)
    launches.add(load(fake, one), one.grid, [_C.Slot(0), _C.Slot(1), *rest])
    graph = _C.Graph(launches, places(*tensors()))

    def work():
        for _ in range(5):
            x, y = tensors()
            graph.run(0, places(x, y))
            done.append((x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    run_together(threads)
    assert len(done) == 20
    for x, y in done:
        torch.testing.assert_close(y, sample.affine_expected(x))


# ---- while something is captured ----


def test_a_captured_stream_gets_the_launches(fake, chain):
    x, y = tensors()
    with fake.context(0):
        stream = fake.stream()
        graph = _C.Graph(chain.list, places(x, y))
        with fake.capturing(stream) as captured:
            graph.run(stream, places(x, y))
            assert not fake.executed
        fake.replay(captured[0], stream)
        torch.testing.assert_close(y, chain.expected(x))


def test_another_streams_capture_goes_on(fake, chain):
    """A graph may be made, started and freed meanwhile: a garbage collector asks nobody."""
    x, y = tensors()
    with fake.context(0):
        captured, own = fake.stream(), fake.stream()
        with fake.capturing(captured) as others:
            chain.list.run(captured, places(x, y))
            graph = _C.Graph(chain.list, places(x, y))
            graph.run(own, places(x, y))
            torch.testing.assert_close(y, chain.expected(x))
            del graph
        fake.replay(others[0], captured)


def test_a_graph_belongs_to_its_device(fake):
    fake.reset(80, 80)
    chain = Chain(fake, device=1)
    x, y = tensors()
    with fake.context(0):
        before = fake.current_context()
        _C.Graph(chain.list, places(x, y)).run(0, places(x, y))
        assert fake.current_context() == before
    torch.testing.assert_close(y, chain.expected(x))
    assert {device for device, _ in fake.executed} == {1}
