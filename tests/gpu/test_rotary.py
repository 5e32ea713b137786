"""Rotary positions, gates and inner norms on the GPU engine, and tables in place."""

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.interpreter import Interpreter
from tests.evidence.ptx import PtxExecutor
from tests.model.tiny_models import OPTIONS, check_error, picture, tiny
from vitkern.contract import judge
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import launch, rotary
from vitkern.ops.rotary import reference

EXECUTORS = {
    "sm_80": lambda: Interpreter("sm_80", order="shuffled", races=True),
    "gfx942": lambda: Interpreter("gfx942"),
    "ptx": PtxExecutor,
}
NEW = ("swiglu", "swiglu-split-normed", "mlp-norm", "separate-qkv", "position-rope",
       "position-rope-x-first", "position-rope-mixed", "position-rope-dinov3")  # fmt: skip


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("half", (False, True), ids=("pairs", "halves"))
@pytest.mark.parametrize("heads", (1, 3))
def test_turns_in_place_and_leaves_values_alone(executor, half, heads):
    g = torch.Generator().manual_seed(0)
    qkv, table = torch.randn(2, 7, 3, 3, 20, generator=g), torch.randn(heads, 7, 20, generator=g)
    got = qkv.clone()
    with launch.executing(EXECUTORS[executor]()):
        rotary.turn(got, table, got, half)
    (theirs,) = reference(qkv, table, half)
    (truth,) = reference(qkv.double(), table.double(), half)
    assert torch.equal(got[:, :, 2], qkv[:, :, 2])
    verdict = judge(got, theirs, truth, dtype=torch.float32)
    assert verdict.passed, verdict.problem


@pytest.mark.parametrize("option", NEW)
def test_the_engine_gives_what_the_modules_give(option):
    model, double = tiny(**OPTIONS[option]), tiny(torch.float64, **OPTIONS[option])
    image = picture(model, B=2)
    model.path = double.path = "reference"
    with torch.no_grad():
        theirs, truth = model(image), double(image.double())
        got = GpuEngine(model, "fp32", Interpreter("sm_80")).logits(image)
    check_error(got, theirs, truth, torch.float32, option, (4.0, 2.0))


@pytest.mark.parametrize("option", NEW)
def test_an_image_s_result_does_not_depend_on_its_batch(option):
    model = tiny(torch.bfloat16, **OPTIONS[option])
    image = picture(model, B=3)
    engine = GpuEngine(model, "bf16", Interpreter("sm_80"))
    together = engine.logits(image)
    assert torch.equal(engine.logits(image[:1]), together[:1])


def test_turning_is_one_launch_a_block():
    model, recorder = tiny(**OPTIONS["position-rope"]), launch.Recorder("sm_80")
    GpuEngine(model, "fp32", recorder).logits(picture(model))
    names = [one.kernel.__name__ for one in recorder.launches]
    assert names.count("rotary_forward") == model.config.depth
    assert len(names) == 2 + 6 * model.config.depth
