"""fp32 on a GPU is multiplied as PyTorch's switches say, unless the model says otherwise."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from benchmarks.gpu.device import computing_in
from tests.model.tiny_models import picture, tiny
from vitkern import dispatch, explanation, packed
from vitkern.engines.gpu import GpuEngine
from vitkern.engines.trace import Launchers
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


DOTS = [(None, "highest", "tf32x3"), (None, "high", "tf32"), ("fp32", "high", "tf32x3"),
        ("tf32", "highest", "tf32")]  # fmt: skip


def recorded(run) -> set:
    """How the launches multiply that `run` makes, in a thread of its own as autograd's are."""
    recorder = launch.Recorder("sm_80")

    def inside():
        with launch.executing(recorder), Launchers():
            run()

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    kinds = [one.arguments["PRECISION"] for one in recorder.launches
             if "PRECISION" in one.arguments]  # fmt: skip
    assert len(kinds) > 5
    return set(kinds)


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("chosen, switch, dot", DOTS)
def test_a_training_step_multiplies_as_the_model_says(chosen, switch, dot, checkpointing):
    """Its backward as its forward, in another thread; what checkpoints compute again, too."""
    model = tiny().train()
    model.precision, model.grad_checkpointing = chosen, checkpointing
    torch.set_float32_matmul_precision(switch)
    made = []
    assert recorded(lambda: made.append(model.fused_forward(picture(model)))) == {dot}
    assert recorded(lambda: made[0].sum().backward()) == {dot}
    assert model.blocks[0].attn.qkv.weight.grad is not None


@pytest.mark.parametrize("chosen, switch, dot", DOTS)
def test_so_does_a_list_of_images(chosen, switch, dot):
    model = tiny(dynamic_image_size=True)
    model.precision = chosen
    torch.set_float32_matmul_precision(switch)
    images = [picture(model, 1), picture(model, 1)]
    with torch.no_grad():
        assert recorded(lambda: packed.fused_forward(model, images, False)) == {dot}


def test_models_of_other_precisions_do_not_disturb_a_backward():
    """Their forwards come between it and its own."""
    one, other = tiny(), tiny()
    one.precision, other.precision = "tf32", "fp32"
    made = []

    def forwards():
        made.append(one.fused_forward(picture(one)))
        other.fused_forward(picture(other))

    assert recorded(forwards) == {"tf32", "tf32x3"}
    assert recorded(lambda: made[0].sum().backward()) == {"tf32"}


@pytest.mark.parametrize("chosen, switch, said", [
    (None, "highest", "fp32, by torch's TF32 switches"),
    (None, "high", "tf32, by torch's TF32 switches"),
    ("fp32", "high", "fp32, by model.precision"),
    ("tf32", "highest", "tf32, by model.precision"),
    ("bf16", "high", "bf16"),
])  # fmt: skip
def test_explain_says_who_chose(monkeypatch, chosen, switch, said):
    model, weight = tiny(), on_gpu(torch.float32)
    monkeypatch.setattr(type(model), "patch_embed_weight", property(lambda self: weight))
    model.precision = chosen
    torch.set_float32_matmul_precision(switch)
    assert explanation._precision(model, dispatch.Route("fused", "")) == said
    by_torch = explanation._precision(model, dispatch.Route("reference", ""))
    wanted = "tf32" if switch == "high" else "fp32"
    assert by_torch == ("bf16" if chosen == "bf16" else f"{wanted}, by torch's TF32 switches")
