"""A model on a GPU: a training step interpreted, and what compilers and users see of it."""

import copy
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.gpu.contract import differentiable, gpu
from tests.model.tiny_models import picture, tiny
from vitkern.engines.trace import Launchers
from vitkern.gpu.runtime import device
from vitkern.precision import PRECISIONS, name_of
from vitkern.registry import REGISTRY
from vitkern.verification.models import joint_error

CASES = {
    "plain": {},
    "dropout": {
        "dropout": 0.1, "attention_dropout": 0.2, "projection_dropout": 0.1, "drop_path": 0.3,
        "layer_scale": 0.5,
    },
    "relative": {"position": "relative", "activation": "gelu_tanh"},
    "qk-norm": {"qk_norm": True, "pre_norm": True, "registers": 2, "activation": "quick_gelu"},
}  # fmt: skip


def gradients(model, image, labels, dtype, path):
    """Loss gradients of all parameters by one path, with the same dropout masks each time."""
    model = copy.deepcopy(model).to(dtype).train()
    forward = getattr(model, f"{path}_forward")  # a dispatch mode is active, which dispatch avoids
    torch.manual_seed(7)
    loss = torch.nn.functional.cross_entropy(forward(image.to(dtype)), labels)
    parameters = dict(model.named_parameters())
    return loss, dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("case", CASES)
def test_a_training_step_has_the_reference_s_gradients(case, dtype):
    model = tiny(dtype, depth=2, **CASES[case])
    image, labels = picture(model, B=4), torch.tensor([1, 5, 20, 36])
    truth_loss, truths = gradients(model, image, labels, torch.float64, "reference")
    with FixedOrder():
        _, torchs = gradients(model, image, labels, dtype, "reference")
    with gpu("fp32"), Launchers():
        loss, ours = gradients(model, image, labels, dtype, "fused")
    assert abs(loss - truth_loss) < 64 * torch.finfo(dtype).eps
    assert ours.keys() == truths.keys()
    got, theirs = joint_error(ours, truths), joint_error(torchs, truths)
    room = PRECISIONS[name_of(dtype)]
    assert got.within(theirs, dtype, gpu=room), f"{got} against PyTorch's {theirs}"


@pytest.mark.parametrize("spec", REGISTRY.values(), ids=lambda s: s.name)
def test_compilers_see_shapes_on_a_gpu(spec):
    """What torch.compile and torch.export trace with: tensors on a GPU that is not there."""
    real = spec.make_inputs(spec.cases[3], torch.bfloat16)
    expected = spec.op.reference(*spec.arguments(real, save=True))
    with FakeTensorMode():
        fake = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for n, t in real.items()
        }
        names, args = differentiable(spec, fake), spec.arguments(fake, save=True)
        results = spec.torch_op()(*args)
        results = results if isinstance(results, tuple) else (results,)
        backward = getattr(torch.ops.vitkern, f"{spec.op.name}_backward").default
        needs = [name in names for name in spec.op.arguments]
        grads = backward(torch.empty_like(results[0]), *args, list(results[1:]), needs)
    for got, wanted in zip(results, expected, strict=True):
        assert (got.shape, got.dtype, got.device.type) == (wanted.shape, wanted.dtype, "cuda")
        assert got.is_contiguous()
    assert [g.shape for g in grads] == [real[n].shape for n in names]


def test_explain_says_what_starts_the_kernels(monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    monkeypatch.setattr(device, "executor", lambda _: types.SimpleNamespace(status=lambda: "so"))
    with torch.no_grad():
        assert "kernels: so" in model.explain()
    monkeypatch.setattr(device, "executor", lambda _: (_ for _ in ()).throw(RuntimeError("none")))
    with torch.no_grad():
        assert "the GPU backend is not available (none)" in model.explain()
