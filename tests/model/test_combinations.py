"""Options that no published model has together work together, or an engine says why not."""

import copy

import pytest
import torch

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.tiny_models import check_error, picture, tiny
from vitkern import ViT, ViTConfig

GATED = dict(mlp="swiglu", activation="silu")
SPLIT = dict(mlp="swiglu_split", activation="silu")
INNER = dict(attention_norm=True, mlp_norm=True)
TOGETHER = {
    "rotary-map": dict(rope="axial", pool="map"),
    "gated-map": dict(**GATED, pool="map", rope="dinov3", rope_half=True),
    "gated-post_norm": dict(**GATED, block="post_norm", rope="axial"),
    "everything-post_norm": dict(
        **SPLIT, **INNER, block="post_norm", norm="rmsnorm", rope="mixed", key_bias=False,
        layer_scale=0.3, qk_norm=True,
    ),
    "gated-parallel": dict(**GATED, block="parallel", rope="axial", qk_norm=True, layer_scale=0.3),
    "parallel-without-bias": dict(**GATED, block="parallel", rope="mixed", qkv_bias=False),
    "gated-twin": dict(**SPLIT, **INNER, block="twin", rope="axial", separate_qkv=True),
    "rmsnorm-inside": dict(**GATED, **INNER, norm="rmsnorm", separate_qkv=True, key_bias=False),
    "rotary-distilled": dict(**GATED, rope="axial", head="distilled", registers=2),
    "rotary-relative": dict(rope="axial", position="relative_mlp", block="post_norm"),
    "rotary-shared-relative": dict(rope="mixed", position="shared_relative_mlp", pool="mean"),
    "pool-of-every-row": dict(
        **GATED, rope="axial", pool="map", pool_heads=4, pool_mlp_width=48, pool_prefix=True,
        pre_norm=True,
    ),
    "rotary-stem": dict(**GATED, rope="axial", stem="r", patch_size=2, image_size=(16, 24)),
}  # fmt: skip
# What the CPU engine leaves to the fused operators.
NOT_ENGINE = {"gated-twin": "the packed engine has no twin blocks"}


@pytest.mark.parametrize("path", ("fused", "engine"))
@pytest.mark.parametrize("name", TOGETHER)
def test_every_path_has_the_modules_result(name, path):
    changes = TOGETHER[name]
    model, whole = tiny(**changes), tiny(torch.float64, **changes)
    image = picture(model)
    model.path = path
    with torch.no_grad():
        if path == "engine" and name in NOT_ENGINE:
            with pytest.raises(RuntimeError, match=NOT_ENGINE[name]):
                model(image)
            return
        truth, theirs = whole.reference_forward(image.double()), model.reference_forward(image)
        check_error(model(image), theirs, truth, torch.float32, name)
        rows, kept = model.forward_intermediates(image, norm=True)
        packed = model.forward_packed([*image])
        again, plain = model(image), model.reference_forward(image, head=False)
    torch.testing.assert_close(rows, plain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(packed, again, rtol=1e-4, atol=1e-4)
    assert len(kept) == model.config.depth


@pytest.mark.parametrize("path", ("fused", "engine"))
@pytest.mark.parametrize(
    "name", ("gated-map", "everything-post_norm", "gated-parallel", "rotary-shared-relative")
)
def test_bf16_is_no_worse_than_the_modules(name, path):
    model = tiny(torch.bfloat16, **TOGETHER[name])
    image, whole = picture(model), copy.deepcopy(model).double()
    model.path = path
    with torch.no_grad():
        truth = whole.reference_forward(image.double())
        with FixedOrder():
            theirs = model.reference_forward(image)
        check_error(model(image), theirs, truth, torch.bfloat16, name)


@pytest.mark.parametrize("name", TOGETHER)
def test_gradients_are_those_of_the_modules(name):
    found = []
    for path in ("reference", "fused"):
        model = tiny(**TOGETHER[name])
        model.path = path
        model(picture(model)).square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-2, atol=1e-4, msg=key)


@pytest.mark.parametrize(
    "changes",
    [SPLIT, dict(key_bias=False), dict(separate_qkv=True), dict(mlp_norm=True)],
    ids=lambda changes: next(iter(changes)),
)
def test_a_parallel_block_says_what_it_cannot_be(changes):
    with pytest.raises(ValueError, match='block="parallel" has one projection'):
        ViTConfig(block="parallel", **changes)


def test_int8_says_which_blocks_it_is_of():
    model = ViT(tiny(block="post_norm").config).eval()
    model.precision, model.path = "int8", "engine"
    with torch.no_grad(), pytest.raises(RuntimeError, match="int8 is of pre_norm blocks"):
        model(picture(model))
