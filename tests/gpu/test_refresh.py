"""New weights are folded into the memory that plans and captured CUDA graphs read."""

import copy

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import fake_cuda
from tests.evidence.interpreter import Interpreter
from tests.gpu import stand_in
from tests.model.tiny_models import picture, tiny
from vitkern.engines import base, gpu
from vitkern.gpu import launch

FP32, BF16 = torch.float32, torch.bfloat16


class Interpreted(gpu.GpuEngine):
    """The GPU's engine for a model on the CPU."""

    def __init__(self, model, precision):
        super().__init__(model, precision, Interpreter("sm_80"))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(base, "engine_class", lambda device: Interpreted)


def addresses(engine):
    """Of everything that launches read."""
    found = []

    def walk(value):
        if isinstance(value, tuple | list):
            for one in value:
                walk(one)
        elif value is not None:
            found.append(value.data_ptr())

    walk((engine._blocks, engine._ends, tuple(engine._grids.values())))
    return found


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


def write_through_data(model):
    for parameter in model.parameters():
        parameter.data[..., 0] += 0.25
    model.repack()


CHANGES = {
    "in place": lambda model: [p.mul_(1.25) for p in model.parameters()],
    "an optimizer's step": step,
    "load_state_dict": lambda model: model.load_state_dict(tiny(
        model.dtype, seed=7, **model.changes
    ).state_dict()),
    "data and repack": write_through_data,
    "moving to where it is": lambda model: [p.mul_(0.75) for p in model.to("cpu").parameters()],
}  # fmt: skip
MODELS = {
    "fp32": (FP32, None, {}),
    "bf16": (BF16, None, {"layer_scale": 0.5}),
    "bf16-of-fp32": (FP32, "bf16", {"registers": 2, "pre_norm": True}),
    "relative": (FP32, None, {"position": "relative"}),
    "learned-angles": (FP32, None, {"rope": "mixed", "position": "none"}),
    "halves": (BF16, None, {"rope": "dinov3", "rope_half": True, "qk_norm": True}),
    "other-grid": (FP32, None, {"dynamic_image_size": True, "final_norm": "after_pool"}),
    "bytes-by-pixels": (FP32, "bf16", {"mean": (0.5,) * 3, "std": (0.25,) * 3}),
}


def make(kind):
    dtype, precision, changes = MODELS[kind]
    model = tiny(dtype, **changes)
    model.changes, model.path, model.precision = changes, "engine", precision
    size = {"y": 16, "x": 12} if kind == "other-grid" else {}
    image = picture(model, B=2, **size)
    if kind == "bytes-by-pixels":  # the filters of which lie in another order
        image = (image * 64).byte().contiguous(memory_format=torch.channels_last)
    return model, image


def cases():
    """Every change of an fp32 model and of a mixed one, one of the others; the rest is long."""
    for kind in MODELS:
        for change in CHANGES:
            short = kind in ("fp32", "bf16-of-fp32") or change == "in place"
            yield pytest.param(kind, change, marks=() if short else pytest.mark.full)


@pytest.mark.parametrize("kind, change", cases())
def test_new_values_are_folded_in_place(kind, change):
    model, image = make(kind)
    with torch.inference_mode():  # whose tensors could not be written later
        before = model(image)
    (engine,) = model.engines.packed()
    places = addresses(engine)
    with torch.no_grad():
        CHANGES[change](model)
        after, fresh = model(image), copy.deepcopy(model)(image)
        assert torch.equal(after, fresh) and not torch.equal(before, after)
        tokens, fresh = (m.forward_features(image) for m in (model, copy.deepcopy(model)))
        assert torch.equal(tokens, fresh)
    assert model.engines.packed() == [engine] and addresses(engine) == places


def test_weights_in_other_memory_make_another_engine():
    model, image = make("fp32")
    with torch.no_grad():
        model(image)
        (engine,) = model.engines.packed()
        model.head.weight.data = model.head.weight.data * 2
        after = model(image)
        assert model.engines.packed() != [engine] and torch.equal(
            after, copy.deepcopy(model)(image)
        )


def test_what_a_graph_reads_is_never_freed(monkeypatch):
    model, image = make("bf16")
    with torch.no_grad():
        model(image)
        (engine,) = model.engines.packed()
        model.train().eval()
        assert not model.engines.packed(), "training holds no second copy of the weights"
        model(image)
        (engine,) = model.engines.packed()
        monkeypatch.setattr(gpu, "_capturing", lambda device: True)
        captured = model(image)
        with pytest.raises(RuntimeError, match="inside a CUDA graph: make one forward before"):
            model.norm.weight.mul_(2)
            model(image)
        monkeypatch.undo()
        monkeypatch.setattr(base, "engine_class", lambda device: Interpreted)
        assert not torch.equal(model.train().eval()(image), captured)
        assert model.engines.packed() == [engine], "a graph reads it"
        model.float()
        assert engine not in model.engines.packed() and engine in model.engines._retired


def test_a_captured_graph_computes_with_the_new_weights(tmp_path):
    """Through the C++ launcher and the stand-in driver, which executes what a graph holds."""
    model = tiny(BF16, width=64, mlp_width=128, depth=2, classes=40)
    image, y = picture(model, B=2), torch.zeros(2, 40, dtype=BF16)
    recorder = launch.Recorder("sm_80")
    with torch.no_grad(), launch.executing(recorder):
        gpu.GpuEngine(model, "bf16", recorder).start("logits", image, y)
    fake, streams = fake_cuda(), []
    executor = stand_in.build(recorder.launches, "sm_80", tmp_path, lambda: streams[0])
    with fake.context(0), torch.no_grad():
        stream = fake.stream()
        streams.append(stream)
        engine = gpu.GpuEngine(model, "bf16", executor)
        first = engine.logits(image)
        with fake.capturing(stream) as graph:
            captured = engine.logits(image)
        fake.replay(graph[0], stream)
        assert torch.equal(captured, first)
        for parameter in model.parameters():
            parameter.mul_(1.25)
        assert engine.stale() and engine.refresh() and not engine.stale()
        fake.replay(graph[0], stream)
        fresh = Interpreted(copy.deepcopy(model), "bf16").logits(image)
    assert torch.equal(captured, fresh) and not torch.equal(captured, first)
