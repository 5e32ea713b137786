"""Every option of the configuration, on every path, against an independent plain PyTorch model."""

import pytest
import torch

from tests.evidence.fixed_order.torch_mode import FixedOrder, fixed_backwards
from tests.model import plain_vit
from tests.model.tiny_models import (
    BASE,
    OPTIONS,
    PATHS,
    check_error,
    force,
    picture,
    state_of,
    tiny,
)
from vitkern import ViT, ops

FP64_CLOSE = dict(rtol=0, atol=1e-11)


def check_against_plain(got, model, image, dtype, function=plain_vit.features):
    """What a model gives against the plain one in float64, by torch's own error in `dtype`."""

    def plain(dtype):
        pixels = image.to(dtype) if image.is_floating_point() else image
        return function(state_of(model, dtype), model.config, pixels)

    truth = plain(torch.float64)
    with FixedOrder():
        torchs = plain(dtype)
    check_error(got, torchs, truth, dtype, function.__name__)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("option", OPTIONS)
def test_matches_plain_model(option, path):
    model = tiny(**OPTIONS[option])
    image = picture(model)
    force(model, path, image)
    with torch.no_grad():
        got, rows = model(image), model.forward_features(image)
    check_against_plain(rows, model, image, torch.float32)
    check_against_plain(got, model, image, torch.float32, plain_vit.logits)


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("option", OPTIONS)
def test_matches_plain_model_block_by_block_in_float64(option, path):
    model = tiny(torch.float64, **OPTIONS[option])
    image = picture(model)
    model.path = path
    truth = plain_vit.tokens(state_of(model), model.config, image)
    if model.config.depth:
        kept = model.forward_intermediates(
            image, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
        )
        for i, rows in enumerate(kept):
            rows = torch.cat(rows[::-1], 1) if isinstance(rows, tuple) else rows
            miss = (rows - truth[i + 1]).abs().max().item()
            assert miss < 1e-11, f"block {i} is the first that differs, by {miss}"
    torch.testing.assert_close(
        model(image), plain_vit.logits(state_of(model), model.config, image), **FP64_CLOSE
    )


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_match_plain_model_in_float64(option, path):
    model = tiny(torch.float64, **OPTIONS[option]).train()
    image = picture(model).requires_grad_()
    model.path = path
    state = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    twin = image.detach().requires_grad_()
    g = torch.Generator().manual_seed(3)
    got = model(image)
    want = plain_vit.logits(state, model.config, twin)
    probe = torch.randn(want.shape, generator=g, dtype=torch.float64)
    (got * probe).sum().backward()
    (want * probe).sum().backward()
    for name, p in [*model.named_parameters(), ("image", image)]:
        twins = twin if name == "image" else state[name]
        if twins.grad is None:
            assert p.grad is None or not p.grad.any(), (
                f"{name} has a gradient, the plain model none"
            )
            continue
        assert p.grad is not None, f"{name} has no gradient"
        scale = twins.grad.abs().max().clamp_min(1e-3)
        # The row statistics an operator saves may be fp32: 1e-6 is their reach.
        miss = ((p.grad - twins.grad).abs().max() / scale).item()
        assert miss < 1e-6, f"gradient of {name} is off by {miss}"


@pytest.mark.parametrize(
    "option",
    [
        "plain",
        "layer-scale",
        "qk-norm",
        "position-relative",
        "position-relative-no-prefix",
        "pool-mean-after",
        "swiglu",
        "swiglu-split-normed",
        "position-rope",
    ],
)
def test_gradients_keep_the_error_rule_in_float32(option):
    model = tiny(**OPTIONS[option])
    model.path = "fused"
    image = picture(model)
    probe = torch.randn(model(image).shape, generator=torch.Generator().manual_seed(3))
    with fixed_backwards():
        (model(image) * probe).sum().backward()

    def plain(dtype):
        state = {n: p.detach().to(dtype).requires_grad_() for n, p in model.named_parameters()}
        (plain_vit.logits(state, model.config, image.to(dtype)) * probe.to(dtype)).sum().backward()
        return {n: p.grad for n, p in state.items()}

    truth = plain(torch.float64)
    with FixedOrder():
        torchs = plain(torch.float32)
    names = [n for n in truth if truth[n] is not None]
    # All gradients as one vector, each parameter in units of its own size; some gradients are 0 in
    # exact arithmetic (a constant added to every key changes no softmax): in units of the largest.
    size = {n: truth[n].square().mean().sqrt() for n in names}
    size = {n: s.clamp_min(1e-2 * max(size.values())) for n, s in size.items()}
    # A row of softmax's gradients adds up to 0, so that the last block's relative bias, which the
    # class token alone reads, is a sum that cancels: in the unit of the largest table.
    tables = [n for n in names if n.endswith("relative_position_bias_table")]
    size |= {n: max(size[table] for table in tables) for n in tables}
    grads = {n: p.grad for n, p in model.named_parameters()}
    one = [
        torch.cat([(g[n].double() / size[n]).flatten() for n in names])
        for g in (grads, torchs, truth)
    ]
    check_error(*one, torch.float32, "gradients")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "option", ["plain", "layer-scale", "pool-mean", "pre-norm", "position-relative"]
)
def test_bf16_model_keeps_the_error_rule(option, path):
    model = tiny(torch.bfloat16, **OPTIONS[option])
    image = picture(model)
    model.precision = "bf16" if path == "engine" else None
    force(model, path, image)
    with torch.no_grad():
        got = model.forward_features(image)
    check_against_plain(got, model, image, torch.bfloat16)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "option",
    [
        "plain",
        "layer-scale",
        "qk-norm",
        "pool-mean",
        "position-relative",
        "position-none-no-prefix",
    ],
)
def test_bf16_precision_of_an_fp32_model_keeps_the_error_rule(option, path):
    model = tiny(**OPTIONS[option])
    image = picture(model)
    model.precision = "bf16"
    force(model, path, image)
    with torch.no_grad():
        got, rows = model(image), model.forward_features(image)
    assert rows.dtype == torch.float32, "the residual stream of an fp32 model stays fp32"
    check_against_plain(rows, model, image, torch.bfloat16)
    assert got.isfinite().all()


DROPS = {
    "embed": {"dropout": 0.3},
    "attention": {"attention_dropout": 0.3},
    "projection": {"projection_dropout": 0.3},
    "path": {"drop_path": 0.6},
    "head": {"head_dropout": 0.4},
    "head-token-norm": {"head_dropout": 0.4, "head": "token_norm"},
    "all": dict(
        dropout=0.1, attention_dropout=0.2, projection_dropout=0.3, drop_path=0.5, head_dropout=0.1
    ),
}


def seeded_drop(seeds):
    """Dropout of the plain model, with the masks that these seeds stand for."""

    def drop(site, x, p):
        if not p:
            return x
        kind, _, block = site.partition(".")
        place = {
            "attention": 0,
            "projection": 1,
            "path1": 1,
            "hidden": 2,
            "mlp": 2,
            "path2": 2,
        }.get(kind)
        index = {"embed": 0, "head": -1}.get(kind, None)
        seed = seeds[index if index is not None else 1 + 3 * int(block) + place].view(1)
        if kind.startswith("path"):
            keep = ops.drop_path_mask(seed, p, x.shape[0]).view(-1, 1, 1)
        else:
            keep = ops.dropout_mask(seed, p, tuple(x.shape), 2 if kind == "hidden" else 0)
        return x * keep / (1 - p)

    return drop


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("drops", DROPS)
def test_dropout_drops_what_its_seeds_say(drops, path):
    model = tiny(torch.float64, **DROPS[drops]).train()
    image = picture(model)
    model.path = path
    torch.manual_seed(7)
    got = model(image)
    torch.manual_seed(7)
    seeds = torch.randint(2**62, (2 + 3 * model.config.depth,), dtype=torch.int64)
    want = plain_vit.logits(state_of(model), model.config, image, seeded_drop(seeds))
    torch.testing.assert_close(got, want, **FP64_CLOSE)
    assert not torch.equal(got, model(image)), "the next call must draw other seeds"
    model.eval()
    torch.testing.assert_close(
        model(image), plain_vit.logits(state_of(model), model.config, image), **FP64_CLOSE
    )


def test_dropout_paths_agree_in_float32_and_with_checkpointing():
    model = tiny(**DROPS["all"]).train()
    image, results, gradients = picture(model), {}, {}
    for path, recompute in (("reference", False), ("fused", False), ("fused", True)):
        model.path = path
        model.set_grad_checkpointing(recompute)
        model.zero_grad()
        torch.manual_seed(11)
        results[path, recompute] = y = model(image)
        y.square().sum().backward()
        gradients[path, recompute] = model.blocks[0].attn.qkv.weight.grad.clone()
    torch.testing.assert_close(
        results["reference", False], results["fused", False], rtol=1e-4, atol=1e-4
    )
    assert torch.equal(results["fused", False], results["fused", True])
    torch.testing.assert_close(gradients["fused", False], gradients["fused", True])


def test_drop_path_rises_linearly_to_the_last_block():
    model = tiny(depth=5, drop_path=0.2)
    assert [b.drop_path1.p for b in model.blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


FAMILIES = (
    "vit_pe_core_tiny_patch16_384",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
)


@pytest.mark.parametrize("model", [*OPTIONS, *FAMILIES])
def test_a_new_model_has_no_memory_as_it_was_found(model):
    """torch.empty gives NaN here, which stays where nothing is initialised."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic fills memory
    try:
        assert torch.empty(3).isnan().all()
        made = ViT(model, depth=1) if model in FAMILIES else ViT(BASE.replace(**OPTIONS[model]))
    finally:
        torch.use_deterministic_algorithms(before)
    assert not [name for name, t in made.state_dict().items() if not t.isfinite().all()]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "option",
    [*(n for n in OPTIONS if n.startswith("position")), "plain", "registers-without-positions"],
)
def test_dynamic_sizes_interpolate_positions(option, path):
    model = tiny(**OPTIONS[option], dynamic_image_size=True)
    image = picture(model, y=20, x=28)
    force(model, path, image)
    with torch.no_grad():
        got = model.forward_features(image)
    check_against_plain(got, model, image, torch.float32)


@pytest.mark.parametrize(
    "option", ["plain", "position-2d", "position-relative", "registers-without-positions"]
)
def test_set_input_size_equals_dynamic_size(option):
    fixed = tiny(torch.float64, **OPTIONS[option])
    free = tiny(torch.float64, **OPTIONS[option], dynamic_image_size=True)
    image = picture(fixed, y=20, x=28)
    fixed.set_input_size((20, 28))
    assert fixed.config.image_size == (20, 28)
    for path in PATHS[:2]:
        fixed.path = free.path = path
        torch.testing.assert_close(fixed(image), free(image), **FP64_CLOSE)


@pytest.mark.parametrize("path", PATHS)
def test_uint8_images_are_normalised(path):
    model = tiny(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    pixels = torch.randint(
        256, (2, 24, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    image = pixels.permute(0, 3, 1, 2)  # NHWC in memory
    force(model, path, image)
    with torch.no_grad():
        got = model.forward_features(image)
    check_against_plain(got, model, image, torch.float32)
