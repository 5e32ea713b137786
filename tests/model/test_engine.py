"""The packed engine: exact, deterministic, batch-invariant, re-entrant, and never out of date."""

import concurrent.futures
import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from tests.evidence.fixed_order.torch_mode import FixedOrder
from vitkern import _C, ViT, ViTConfig, cpu
from vitkern.contract import SLACK, Error, Slack, judge
from vitkern.engines.cpu import CpuEngine
from vitkern.precision import CHOICES

TINY = ViTConfig(image_size=48, patch_size=8, width=60, depth=3, heads=3, mlp_width=130, classes=11)


def tiny(**changes) -> ViT:
    torch.manual_seed(0)
    model = ViT(TINY.replace(**changes)).eval()
    for parameter in model.parameters():  # nothing at zero or one, so that nothing can hide
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tf32_slack(isa: str) -> Slack:
    """Half of TF32 units' own error, but for one term of fp16, which has TF32's bits."""
    return SLACK if isa == "amx_fp16" else (0.5, 0.5)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(7, 3, 48, 48, generator=torch.Generator().manual_seed(1))


def truth_and_torch(model, image):
    """Logits of the reference path in float64 and in the model's own dtype."""
    wide = copy.deepcopy(model).double()
    wide.path = model.path = "reference"
    try:
        with torch.no_grad(), FixedOrder():
            return wide(image.double()), model(image)
    finally:
        model.path = "auto"


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "mean"},
        {"pool": "mean", "final_norm": "after_pool", "class_token": False, "registers": 4},
        {"qk_norm": True, "layer_scale": 0.1, "qkv_bias": False},
        {"pre_norm": True, "position": "sincos_2d", "activation": "quick_gelu"},
        {"position": "relative", "activation": "gelu_tanh"},
        {"head": "tanh"},
        {"classes": 0},
        {"width": 96, "heads": 1, "mlp_width": 1},
    ],
    ids=lambda c: "-".join(map(str, c.values())) or "default",
)
def test_matches_reference_on_every_instruction_set(changes, isa, images):
    model = tiny(**changes)
    truth, torchs = truth_and_torch(model, images)
    with torch.inference_mode():
        ours = CpuEngine(model, "fp32", isa=isa).logits(images)
    assert not judge(ours, torchs, truth, dtype=torch.float32).problem


def bf16_results(model, images, isa):
    """Of the engine in bf16, of PyTorch with the model in bf16, and the truth."""
    truth, _ = truth_and_torch(model, images)
    half = copy.deepcopy(model).bfloat16()
    half.path = "reference"
    with torch.inference_mode():
        with FixedOrder():
            torchs = half(images.bfloat16())
        ours = CpuEngine(model, "bf16", isa=isa).logits(images)
    return ours, torchs, truth


@pytest.mark.parametrize("isa", cpu.isas())
def test_bf16_is_at_least_as_exact_as_torch_bf16(isa, images):
    assert not judge(*bf16_results(tiny(), images, isa), dtype=torch.bfloat16).problem


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("changes", [{}, {"width": 96, "heads": 1, "mlp_width": 1600}], ids=str)
def test_tf32_is_more_exact_than_tf32_units(changes, isa, images):
    model = tiny(**changes)
    truth, _ = truth_and_torch(model, images)
    with torch.inference_mode():
        model.path = "reference"
        with FixedOrder(tf32=True):
            units = model(images)
        ours = CpuEngine(model, "tf32", isa=isa).logits(images)
    assert not judge(ours, units, truth, dtype=torch.float32, slack=tf32_slack(isa)).problem


@pytest.mark.parametrize("isa", cpu.isas())
def test_bf16_stays_as_exact_as_torch_with_outliers(isa):
    """One column in forty outweighs the others, as channels of trained ViTs do.

    Of many images: where two scores of thousands tie, any error decides the whole softmax.
    """
    images = torch.randn(42, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    model = tiny(width=192, heads=3, mlp_width=300)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[..., ::40] *= 30
    results = bf16_results(model, images, isa)
    assert not judge(*results, dtype=torch.bfloat16, slack=(1.0, 1.0)).problem


@pytest.mark.parametrize("isa", cpu.isas())
def test_the_largest_sums_do_not_overflow(isa):
    """Equal numbers: where products are integers, each is as large as it can be."""
    model = tiny(depth=1, classes=0, final_norm="none", class_token=False, pool="mean")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.patch_embed.proj.weight.fill_(-0.37)
    with torch.inference_mode():
        got = CpuEngine(model, "bf16", isa=isa).logits(torch.full((1, 3, 48, 48), 2.5))
    assert torch.allclose(got, torch.tensor(-0.37 * 2.5 * 3 * 8 * 8), rtol=2**-8)


@pytest.mark.parametrize("power", (-27, -16, 0, 16, 30, 38))
@pytest.mark.parametrize("isa", cpu.isas())
def test_elements_of_any_magnitude_keep_their_bits(isa, power, images):
    """Where a block of them has one scale, their squares may leave the range of fp32."""
    model = tiny(depth=1, classes=0, final_norm="none", class_token=False, pool="mean")
    images = images.clamp(-3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        weight = model.patch_embed.proj.weight.normal_()
        want = F.conv2d(images.double(), weight.double(), stride=8).mean((2, 3))
        weight.mul_(10.0 ** -min(power, 28))
    with torch.inference_mode():
        engine = CpuEngine(model, "bf16", isa=isa)
        got = engine.logits(images * 10.0**power) / 10.0 ** (power - min(power, 28))
    assert (got - want).square().mean().sqrt() < 2**-8 * want.square().mean().sqrt()


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("precision", (*CHOICES, "int8"))
@pytest.mark.parametrize("isa", cpu.isas())
def test_an_image_with_a_bad_pixel_spoils_itself_only(isa, precision, bad, images):
    engine = CpuEngine(tiny(), precision, isa=isa)
    good = engine.logits(images)
    images[2, 1, 5, 5] = bad
    got = engine.logits(images)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4, 5, 6]], good[[0, 1, 3, 4, 5, 6]])


@pytest.mark.parametrize("precision", (*CHOICES, "int8"))
@pytest.mark.parametrize("isa", cpu.isas())
def test_the_class_row_alone_has_the_bits_of_all_rows(isa, precision, images):
    """The last block computes one row of each image when only that one is pooled."""
    model = tiny(classes=0)
    engine = CpuEngine(model, precision, isa=isa)
    assert torch.equal(engine.logits(images), engine.tokens(images)[:, 0])


@pytest.mark.parametrize("precision", (*CHOICES, "int8"))
@pytest.mark.parametrize("isa", cpu.isas())
def test_a_batch_gives_the_bits_of_its_images(isa, precision, images):
    """Whatever the batch size and the number of threads."""
    engine = CpuEngine(tiny(), precision, isa=isa)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([engine.logits(images[i : i + 1]) for i in range(7)])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for batch in (1, 2, 3, 5, 7):
                assert torch.equal(engine.logits(images[:batch]), alone[:batch]), (
                    f"{threads=} {batch=}"
                )
    finally:
        torch.set_num_threads(before)


def test_runs_from_many_threads_at_once(images):
    model = tiny()
    with torch.inference_mode():
        expected = model(images)

    def call(_):
        with torch.inference_mode():
            return model(images)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for result in pool.map(call, range(64)):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ("blocks.1.mlp.fc1.weight", "cls_token", "pos_embed", "head.bias"))
def test_sees_every_change_of_a_parameter(name, images):
    model = tiny()
    with torch.inference_mode():
        before = model(images)
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)
    with torch.inference_mode():
        after = model(images)
    assert not torch.equal(before, after)
    fresh = ViT(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert torch.equal(after, fresh(images))
        model.load_state_dict(tiny().state_dict())
        assert torch.equal(model(images), before)


def reference_of(model, image):
    fresh = copy.deepcopy(model)
    fresh.path = "reference"
    with torch.no_grad():
        return fresh(image)


def assert_right(model, image):
    """Whatever was done to the model: its result is what its modules mean."""
    with torch.inference_mode():
        torch.testing.assert_close(model(image), reference_of(model, image), rtol=1e-4, atol=1e-4)


def tie(model):
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    model.blocks[1].ls2.gamma = model.blocks[1].ls1.gamma


def new_memory(model):
    flat = torch.nn.utils.parameters_to_vector(model.parameters()) * 1.5
    torch.nn.utils.vector_to_parameters(flat, model.parameters())


def fused_step(model):
    with torch.enable_grad():
        model(torch.ones(1, 3, 48, 48)).sum().backward()
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


CHANGES = {
    "tied parameters": tie,
    "parameters with new memory": new_memory,
    "a fused optimizer's step": fused_step,
    "a bias where there was none": lambda m: setattr(
        m.blocks[0].attn.qkv, "bias", torch.nn.Parameter(torch.ones(180))
    ),
    "a norm without weights": lambda m: setattr(
        m, "norm", torch.nn.LayerNorm(60, eps=1e-6, elementwise_affine=False)
    ),
    "another number of heads": lambda m: setattr(m.blocks[0].attn, "heads", 2),
    "another activation": lambda m: setattr(m.blocks[0].mlp.act, "name", "quick_gelu"),
    "another layer's dtype": lambda m: m.head.bfloat16().float(),
    "an inference tensor": lambda m: m.reset_classifier(5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_stays_right_after(change, images):
    model = tiny(qkv_bias=False, layer_scale=0.5)
    with torch.inference_mode():
        model(images)  # packed before the change
    with torch.inference_mode() if change is CHANGES["an inference tensor"] else torch.no_grad():
        change(model)
    assert_right(model, images)


def test_the_defaults_of_torch_do_not_matter(images):
    model = tiny(mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.inference_mode():
        expected = model(images)
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            try:
                assert torch.equal(model(images), expected)
            finally:
                torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert torch.equal(model(images), expected)


def test_a_lazy_minus_sign_is_seen(images):
    negative = torch.complex(images, images).conj().imag
    assert negative.is_neg()
    assert_right(tiny(), negative)


def test_refuses_rows_that_the_configuration_does_not_make(images):
    model = tiny()
    model.pos_embed = torch.nn.Parameter(torch.zeros(1, 5, 60))
    with torch.inference_mode(), pytest.raises(ValueError, match="pos_embed is of shape"):
        model(images)
    model = tiny()
    model.cls_token = None
    with torch.inference_mode(), pytest.raises(ValueError, match="cls_token is None"):
        model(images)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: torch.cat([t, t], -1)[..., :48],
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.repeat_interleave(2, 0)[::2],
    ],
    ids=("channels_last", "sliced", "transposed", "every_second"),
)
def test_reads_any_layout_in_place(view, images):
    model = tiny()
    with torch.inference_mode():
        assert torch.equal(model(view(images)), model(images))


def test_uint8_images_are_normalised_inside(images):
    model = tiny(mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    pixels = torch.randint(256, (3, 48, 48, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in (model.config.mean, model.config.std))
    with torch.inference_mode():
        got, want = model(pixels), model((pixels / 255 - mean) / std)
    assert Error.of(got, want).worst < 1e-5


def test_nan_stays_in_its_image(images):
    images[2, 0, 5, 5] = float("nan")
    with torch.inference_mode():
        bad = tiny()(images).isnan()
    assert bad[2].all() and not bad[[0, 1, 3, 4, 5, 6]].any()


def test_a_steady_state_allocates_no_scratch(images):
    model = tiny()
    with torch.inference_mode():
        model(images)
        before = _C.arena_allocations()
        for _ in range(5):
            model(images)
    assert _C.arena_allocations() == before


def test_empty_batch():
    with torch.inference_mode():
        assert tiny()(torch.empty(0, 3, 48, 48)).shape == (0, 11)


def test_intermediate_sizes_are_remembered_but_not_all(images):
    model = tiny(dynamic_image_size=True)
    with torch.inference_mode():
        for size in range(8, 8 * 70, 8):
            model(torch.zeros(1, 3, size, 8))
    assert len(model.engines.ready("fp32")._grids) <= 64


def test_engine_dies_with_its_model():
    model = tiny()
    with torch.inference_mode():
        model(torch.zeros(1, 3, 48, 48))
    import weakref

    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_native_engine_refuses_a_missing_or_misshapen_weight():
    sizes = dict(channels=3, patch_y=8, patch_x=8, width=8, heads=2, mlp_width=8, depth=1, eps=1e-6)
    kinds = dict(
        activation=_C.Activation.gelu, precision=_C.Precision.fp32,
        norm=_C.NormKind.layer, order=_C.Order.pre_norm,
        gated=False, rotary_heads=0, rotary_half=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"patch_embed.proj.weight' is missing"):
        _C.Engine("", **sizes, **kinds).finish()
    weight = torch.zeros(8, 5)
    engine = _C.Engine("", **sizes, **kinds)
    engine.set_matrix("patch_embed.proj.weight", _C.DType.f32, weight.data_ptr(), 8, 5)
    with pytest.raises(ValueError, match=r"has shape \(8, 5\), expected \(8, 192\)"):
        engine.finish()
    with pytest.raises(ValueError, match="multiple of heads"):
        _C.Engine("", **{**sizes, "heads": 3}, **kinds)
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        _C.Engine("sse9", **sizes, **kinds)
