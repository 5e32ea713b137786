"""What vitkern.ViT promises as a module: names, counts, methods, paths, state."""

import copy
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import vitkern
from tests.model import plain_vit
from tests.model.tiny_models import OPTIONS, PATHS, force, picture, state_of, tiny
from tests.threads import run_together
from vitkern import ViT, ViTConfig

COUNTS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "L/16": 304_326_632,
    "H/14": 632_045_800,
    "vit_base_patch16_224": 86_567_656,
    "deit_tiny_patch16_224": 5_717_416,
}


def count(model):
    return sum(p.numel() for p in model.parameters())


# ---- names, counts, table ----


@pytest.mark.parametrize("name", COUNTS)
def test_has_the_published_number_of_parameters(name):
    assert count(ViT(name, device="meta")) == COUNTS[name]


def test_cifar_model_has_its_number_of_parameters():
    config = ViTConfig(
        image_size=32, patch_size=8, depth=24, width=1024, mlp_width=4096, heads=16, classes=10,
        position="sincos_1d", head="token_norm",
    )  # fmt: skip
    assert count(ViT(config, device="meta")) == 302_520_350


def test_every_name_builds():
    from vitkern.config import names

    for name in names():
        model = ViT(name, device="meta", **({} if "/" not in name else {"image_size": 224}))
        assert model.config == ViTConfig.named(name), name


def test_changes_of_a_named_model_are_fields():
    model = ViT("B/16", image_size=384, classes=10, device="meta")
    assert (model.config.tokens, model.num_classes, model.embed_dim) == (577, 10, 768)
    assert ViT(model.config, classes=3, device="meta").head.out_features == 3
    assert ViT("timm/vit_base_patch16_224.augreg_in21k", device="meta").config == ViTConfig.named(
        "B/16"
    )


def test_summary_counts_multiply_adds(capsys):
    model = ViT("B/16", device="meta")
    table = model.summary()
    assert f"{table.multiply_adds / 1e9:.1f}" == "17.6"
    assert f"{model.summary(384, show=False).multiply_adds / 1e9:.1f}" == "55.5"
    assert table.parameters == sum(row.parameters for row in table.rows) == COUNTS["B/16"]
    printed = capsys.readouterr().out
    assert printed.count("total") == 1 and "86,567,656" in printed and "17.6 G" in printed


@pytest.mark.parametrize("option", OPTIONS)
def test_summary_accounts_for_every_parameter(option):
    model = tiny(**OPTIONS[option])
    table = model.summary(show=False)
    assert table.parameters == sum(row.parameters for row in table.rows) == count(model)


def test_import_is_lean():
    code = (
        "import sys, vitkern; vitkern.__version__; vitkern.ViTConfig;"
        "bad = {'torch', 'triton', 'numpy', 'vitkern._C', 'vitkern.ops'} & set(sys.modules);"
        "assert not bad, bad;"
        "from vitkern import ViT; ViT('Ti/16', device='meta');"
        "bad = {'triton', 'vitkern._C'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_package_offers_its_names():
    assert {"ViT", "ViTConfig", "accelerate"} <= set(dir(vitkern))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vitkern.nothing  # noqa: B018


# ---- timm's methods ----


def test_forward_is_features_then_head():
    model = tiny(torch.float64)
    image = picture(model)
    for path in PATHS[:2]:
        model.path = path
        torch.testing.assert_close(model.forward_head(model.forward_features(image)), model(image))


def test_pre_logits_are_what_the_head_reads():
    for head in ("linear", "tanh"):
        model = tiny(torch.float64, head=head)
        rows = model.forward_features(picture(model))
        torch.testing.assert_close(
            model.head(model.forward_head(rows, pre_logits=True)), model.forward_head(rows)
        )


def test_intermediates_have_timms_shapes():
    model = tiny(registers=1)
    model.path = "reference"
    image = picture(model, B=2)
    final, maps = model.forward_intermediates(image, indices=2)
    assert final.shape == (2, 26, 32) and [m.shape for m in maps] == [(2, 32, 6, 4)] * 2
    (patches, prefix), *_ = model.get_intermediate_layers(
        image, n=[0, -1], return_prefix_tokens=True
    )
    assert patches.shape == (2, 24, 32) and prefix.shape == (2, 2, 32)
    last = model.forward_intermediates(
        image, [2], norm=True, output_fmt="NLC", intermediates_only=True
    )[0]
    torch.testing.assert_close(last, model.forward_features(image)[:, 2:])


def test_stop_early_runs_no_later_block():
    model = tiny()
    ran = []
    model.blocks[2].register_forward_hook(lambda *_: ran.append(2))
    model.forward_intermediates(picture(model), [0, 1], stop_early=True, intermediates_only=True)
    assert not ran


def test_reset_classifier_starts_from_zero():
    model = tiny()
    model.reset_classifier(5)
    assert model.num_classes == 5 and not model.head.weight.any() and not model.head.bias.any()
    assert model(picture(model)).shape == (5, 5)
    model.reset_classifier(0, "avg")
    assert model.config.pool == "mean" and model(picture(model)).shape == (5, 32)
    model.reset_classifier(4, "")
    assert model(picture(model)).shape == (5, 25, 4)


def test_reset_token_norm_head_can_learn():
    model = tiny(head="token_norm").train()
    model.reset_classifier(6)
    model(picture(model))[:, 0].sum().backward()
    assert model.head.weight.grad.abs().max() > 0


def test_set_patch_size_keeps_a_constant_image():
    model = tiny(torch.float64)
    small = model.patch_embed(torch.ones(1, 3, 24, 16, dtype=torch.float64))
    model.set_input_size((48, 32), patch_size=8)
    big = model.patch_embed(torch.ones(1, 3, 48, 32, dtype=torch.float64))
    torch.testing.assert_close(small, big)
    assert model.config.grid == (6, 4) and model(
        torch.ones(1, 3, 48, 32, dtype=torch.float64)
    ).shape == (1, 37)


def test_no_weight_decay_names_exist():
    for option in ("plain", "registers", "position-2d", "position-relative"):
        model = tiny(**OPTIONS[option])
        names = model.no_weight_decay()
        assert names and names <= {n for n, _ in model.named_parameters()}


def test_meta_model_can_be_filled():
    model = ViT(tiny().config, device="meta")
    model.load_state_dict(tiny().state_dict(), assign=True)
    image = picture(model)
    model.path = "reference"
    torch.testing.assert_close(model.eval()(image), force(tiny(), "reference", image)(image))


def test_initial_weights_are_timms():
    model = ViT("Ti/16", position="relative", layer_scale=1e-4)
    assert model.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.head.bias.any() and not model.blocks[3].attn.qkv.bias.any()
    assert (model.blocks[0].ls1.gamma == 1e-4).all() and (model.norm.weight == 1).all()
    assert model.cls_token.abs().max() < 1e-4


# ---- state ----


@pytest.mark.parametrize("path", PATHS)
def test_sees_changed_weights(path):
    model = tiny()
    image = picture(model)
    force(model, path, image)
    with torch.no_grad():
        model(image)
        model.blocks[1].mlp.fc1.weight.mul_(0.5)
        model.pos_embed.add_(0.1)
        model.head = nn.Linear(32, 37)
        want = plain_vit.logits(state_of(model), model.config, image.double()).float()
        torch.testing.assert_close(model(image), want, rtol=1e-4, atol=1e-4)
        model.load_state_dict(tiny(seed=5).state_dict())
        want = plain_vit.logits(state_of(model), model.config, image.double()).float()
        torch.testing.assert_close(model(image), want, rtol=1e-4, atol=1e-4)


def test_copies_and_pickles():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        want = model(image)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin_result = twin(image)
            assert torch.equal(twin_result, want)
            twin.head.weight.zero_()
            assert torch.equal(model(image), want), "the copy must not share weights"
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        twin = ViT(model.config).eval()
        twin.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(twin(image), want)


def test_moves_between_dtypes():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        want = model(image)
        assert model.double()(image.double()).dtype == torch.float64
        assert model.bfloat16()(image.bfloat16()).dtype == torch.bfloat16
        torch.testing.assert_close(model.half()(image.half()).float(), want, rtol=0.1, atol=0.2)


def test_threads_share_a_model():
    model = tiny()
    images = [picture(model, seed=s) for s in range(4)]
    results = {}
    with torch.inference_mode():
        want = [model(image) for image in images]
    fresh = tiny()

    def run(index):
        with torch.inference_mode():
            results[index] = [fresh(images[index]) for _ in range(10)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    run_together(threads)
    for index, found in results.items():
        assert all(torch.equal(y, want[index]) for y in found)
    assert len(results) == 4


def test_training_learns_a_rule():
    torch.manual_seed(0)
    model = ViT(tiny().config, classes=2, drop_path=0.1, dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    image = torch.randn(64, 3, 24, 16)
    label = torch.arange(64) % 2
    image[label == 1, 0, :12] += 1
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        assert (model.eval()(image).argmax(1) == label).float().mean() > 0.9


# ---- accelerate ----


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accelerate_shares_parameters(precision):
    model = tiny().train()
    model.head.weight.requires_grad_(False)
    fast = vitkern.accelerate(model, precision)
    assert not fast.training and fast.precision == precision and model.training
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    assert not model.head.weight.requires_grad, "sharing must not touch requires_grad"
    image = picture(model)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), model.eval()(image), rtol=0.1, atol=0.2)
