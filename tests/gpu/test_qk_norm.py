"""Queries and keys normalised in place, in packed qkv, as the GPU engine does it."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.evidence.interpreter import Interpreter
from tests.evidence.ptx import PtxExecutor
from tests.gpu import contract
from tests.model.tiny_models import picture, tiny
from vitkern.contract import judge
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import launch, layernorm

EXECUTORS = {
    "sm_80": lambda: Interpreter("sm_80", order="shuffled", races=True),
    "gfx942": lambda: Interpreter("gfx942"),
    "ptx": PtxExecutor,
}


SHAPES = [(2, 7, 3, 64), (1, 5, 2, 20), (1, 1, 1, 1), (1, 3, 2, 88)]  # B, S, H, E


def packed(B, S, H, E, dtype):
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, S, 3, H, E, generator=g) * 2 + 0.5
    norms = [(1 + torch.randn(E, generator=g) / 3, torch.randn(E, generator=g)) for _ in range(2)]
    return qkv.to(dtype), [tuple(t.to(dtype) for t in norm) for norm in norms]


def reference(qkv, norms, dtype):
    q, k, v = qkv.to(dtype).unbind(2)
    q, k = (
        F.layer_norm(t, t.shape[-1:], *(p.to(dtype) for p in norm), 1e-6)
        for t, norm in zip((q, k), norms, strict=True)
    )
    return torch.stack([q, k, v], 2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("numerics", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize(
    "shape", [(2, 7, 3, 64), (1, 5, 2, 20), (1, 1, 1, 1), (1, 3, 2, 88)], ids=str
)
def test_matches_reference(shape, numerics, executor):
    dtype = contract.DTYPES[numerics]
    qkv, norms = packed(*shape, dtype)
    with FixedOrder():
        torchs = reference(qkv, norms, dtype)
    truth, got = reference(qkv, norms, torch.float64), qkv.clone()
    with launch.executing(EXECUTORS[executor]()):
        layernorm.normalise_heads(got, *norms, 1e-6)
    assert torch.equal(got[:, :, 2], qkv[:, :, 2]), "values stay as they are"
    verdict = judge(got, torchs, truth, dtype=dtype)
    assert verdict.passed, verdict.problem


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_an_image_s_result_does_not_depend_on_its_batch(dtype):
    model = tiny(dtype, qk_norm=True)
    image = picture(model, B=5)
    engine = GpuEngine(model, "fp32" if dtype == torch.float32 else "bf16", Interpreter("sm_80"))
    together = engine.logits(image)
    for B in (1, 2):
        assert torch.equal(engine.logits(image[:B]), together[:B])


def test_a_block_is_six_launches():
    model = tiny(qk_norm=True)
    image, recorder = picture(model), launch.Recorder("sm_80")
    assert not GpuEngine.why_not(model, image, "fp32")
    GpuEngine(model, "fp32", recorder).logits(image)
    names = [one.kernel.__name__ for one in recorder.launches]
    assert names.count("heads_norm_forward") == model.config.depth
    assert len(names) == 2 + 6 * model.config.depth
