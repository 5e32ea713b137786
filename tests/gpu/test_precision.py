"""fp32 on a GPU is multiplied as PyTorch's switches say, unless the model says otherwise."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from benchmarks.gpu.device import computing_in
from tests.model.tiny_models import picture, tiny
from vitkern import dispatch
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import launch

MATMUL = torch.backends.cuda.matmul
SWITCHES = {
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "fp32_precision": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def switches():
    yield
    if hasattr(MATMUL, "fp32_precision"):
        MATMUL.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


def on_gpu(dtype):
    """A parameter on a GPU that is not there."""
    with FakeTensorMode():
        return torch.empty(4, dtype=dtype, device="cuda")


@pytest.mark.parametrize("switch", SWITCHES)
def test_an_fp32_model_follows_torchs_switches(switch):
    if switch == "fp32_precision" and not hasattr(MATMUL, "fp32_precision"):
        pytest.skip("a switch of torch 2.9")
    model, weight = tiny(), on_gpu(torch.float32)
    assert dispatch.precision_of(model, weight) == "fp32"
    SWITCHES[switch]()
    assert dispatch.precision_of(model, weight) == "tf32"
    assert dispatch.precision_of(model, on_gpu(torch.bfloat16)) == "bf16"
    assert dispatch.precision_of(model) == "fp32", "on the CPU nothing changes"
    for chosen in ("fp32", "tf32", "bf16"):
        model.precision = chosen
        assert dispatch.precision_of(model, weight) == chosen


def test_the_benchmarks_tf32_is_everybodys():
    model, weight = tiny(), on_gpu(torch.float32)
    for precision in ("tf32", "fp32"):
        with computing_in(precision):
            assert dispatch.precision_of(model, weight) == precision


@pytest.mark.parametrize("precision, dot", [("fp32", "tf32x3"), ("tf32", "tf32")])
@pytest.mark.parametrize("switch", ("highest", "high"))
def test_an_engine_s_plans_are_of_its_own_precision(precision, dot, switch):
    """Whatever the switch says when they are made: each precision has an engine, and its plans."""
    model = tiny()
    image, recorder = picture(model), launch.Recorder("sm_80")
    engine = GpuEngine(model, precision, recorder)
    torch.set_float32_matmul_precision(switch)
    engine.logits(image)
    used = {one.arguments["PRECISION"] for one in recorder.launches if "PRECISION" in one.arguments}
    assert used == {dot}
