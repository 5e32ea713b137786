"""Forwards as CUDA graphs: made at the second call of a shape, bounded, and never in the way."""

import copy
import gc
import threading

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import fake_cuda
from tests.evidence.interpreter import Interpreter
from tests.gpu import stand_in
from tests.model.tiny_models import picture, tiny
from tests.threads import run_together
from vitkern import ViT, explanation
from vitkern.engines import base, gpu
from vitkern.gpu import launch

BF16 = torch.bfloat16
LAUNCHES = 1 + 5 * 2 + 1


def small():
    return tiny(BF16, width=64, mlp_width=128, depth=2, classes=40).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("binaries")


@pytest.fixture
def engine(folder):
    """On the stand-in driver, which executes what it is given."""
    model, recorder = small(), launch.Recorder("sm_80")
    with torch.no_grad(), launch.executing(recorder):
        recording = gpu.GpuEngine(model, "bf16", recorder)
        for B in range(1, gpu.PLANS_KEPT + 4):
            y = torch.zeros(B, 40, dtype=BF16)
            recording.start("logits", picture(model, B=B), y)
    executor = stand_in.build(recorder.launches, "sm_80", folder)
    with torch.no_grad():
        yield gpu.GpuEngine(model, "bf16", executor)


def expected(engine, image):
    return gpu.GpuEngine(copy.deepcopy(engine.model), "bf16", Interpreter("sm_80")).logits(image)


def started(call):
    """The driver's calls that start something."""
    before = len(fake_cuda().journal())
    call()
    names = ("cuLaunchKernel", "cuGraphLaunch", "cuGraphInstantiateWithFlags")
    return [line for line in fake_cuda().journal()[before:] if line in names]


def test_the_second_forward_of_a_shape_is_a_graph_and_results_stay(engine):
    images = [picture(engine.model, B=2, seed=seed) for seed in range(3)]
    results = []
    kinds = [started(lambda one=one: results.append(engine.logits(one))) for one in images]
    assert kinds[0] == ["cuLaunchKernel"] * LAUNCHES
    assert kinds[1] == ["cuGraphInstantiateWithFlags", "cuGraphLaunch"]
    assert kinds[2] == ["cuGraphLaunch"]
    assert engine.native and "1 so far" in engine.graphs
    for image, result in zip(images, results, strict=True):
        assert torch.equal(result, expected(engine, image)), "a later forward wrote into it"
    assert engine.executor.launched == 3 * LAUNCHES


def test_a_graph_computes_with_refreshed_weights(engine):
    image = picture(engine.model, B=2)
    before = [engine.logits(image) for _ in range(2)][-1]
    for parameter in engine.model.parameters():
        parameter.mul_(1.25)
    assert engine.stale() and engine.refresh()
    calls = started(lambda: before.copy_(engine.logits(image) - before))
    assert calls == ["cuGraphLaunch"] and before.abs().max() > 0
    assert torch.equal(engine.logits(image), expected(engine, image))


def test_graphs_are_as_many_as_plans_and_go_with_the_engine(engine):
    fake, model = fake_cuda(), engine.model
    gc.collect()
    before = fake.library.fake_graphs()
    fake.library.fake_execute(None)  # what it computes is not looked at
    try:
        for B in range(1, gpu.PLANS_KEPT + 4):
            for _ in range(2):
                engine.logits(picture(model, B=B))
            assert fake.library.fake_graphs() - before <= gpu.PLANS_KEPT
    finally:
        fake.library.fake_execute(fake._callback)
    assert fake.library.fake_graphs() > before
    engine._plans.clear()
    assert fake.library.fake_graphs() == before


def test_they_can_be_turned_off(engine, monkeypatch):
    image, before = picture(engine.model, B=2), fake_cuda().library.fake_graphs()
    for _ in range(2):
        engine.logits(image)
    assert fake_cuda().library.fake_graphs() == before + 1
    engine.model.cuda_graphs = False
    assert started(lambda: engine.logits(image)) == ["cuLaunchKernel"] * LAUNCHES
    assert fake_cuda().library.fake_graphs() == before and engine.graphs.startswith("off")
    engine.model.cuda_graphs = True
    assert started(lambda: engine.logits(image))[-1] == "cuGraphLaunch"
    monkeypatch.setattr(gpu, "GRAPHS", False)
    assert started(lambda: engine.logits(image)) == ["cuLaunchKernel"] * LAUNCHES
    assert "VITKERN_CUDA_GRAPHS=0" in engine.graphs


def test_a_graph_that_cannot_be_made_is_tried_once_and_said(engine):
    image = picture(engine.model, B=2)
    engine.logits(image)
    fake_cuda().fail("cuGraphInstantiateWithFlags", 2)
    calls = started(lambda: engine.logits(image))
    assert calls == ["cuGraphInstantiateWithFlags", *["cuLaunchKernel"] * LAUNCHES]
    assert engine.graphs.startswith("none (making a graph of launches: cuGraphInst")
    assert started(lambda: engine.logits(image)) == ["cuLaunchKernel"] * LAUNCHES
    assert torch.equal(engine.logits(image), expected(engine, image))


def test_a_captured_forward_is_the_captures_own(engine, monkeypatch):
    """Its buffers are no other plan's, and nothing of this engine's graphs is in it."""
    image, fake = picture(engine.model, B=2), fake_cuda()
    with fake.context(0):
        stream = fake.stream()
        engine.executor.stream = lambda: stream
        for _ in range(2):
            engine.logits(image)
        # PyTorch keeps the memory that is allocated during a capture: here the plan does.
        kept, make = [], engine._plan
        monkeypatch.setattr(engine, "_plan", lambda *given: kept.append(make(*given)) or kept[0])
        monkeypatch.setattr(gpu, "_capturing", lambda device: True)
        with fake.capturing(stream) as graph:
            captured = engine.logits(image)
        monkeypatch.undo()
        assert engine.held
        fake.replay(graph[0], stream)
        assert torch.equal(captured, engine.logits(image))


def test_threads_share_a_graph(engine):
    images = [picture(engine.model, B=2, seed=seed) for seed in range(4)]
    wanted, found = [expected(engine, image) for image in images], {}
    engine.logits(images[0])

    def work(i):
        with torch.no_grad():
            found[i] = [engine.logits(images[i]) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    run_together(threads)
    for i, results in found.items():
        assert all(torch.equal(result, wanted[i]) for result in results)
    assert len(found) == 4 and "1 so far" in engine.graphs


def test_explain_says_it(engine, monkeypatch):
    model = engine.model
    monkeypatch.setattr(base, "engine_class", lambda device: lambda *_: engine)
    monkeypatch.setattr(ViT, "device", torch.device("cuda", 0))
    monkeypatch.setattr(explanation, "_gpu_kernels", lambda model: "pretended")
    assert "CUDA graphs" not in model.explain(), "there is no engine yet"
    model.engines.ready("bf16")
    assert "\nCUDA graphs: from the second forward of a shape on; 0 so far" in model.explain()
    model.cuda_graphs = False
    assert "\nCUDA graphs: off, by model.cuda_graphs" in model.explain()
