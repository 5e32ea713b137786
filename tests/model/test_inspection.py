"""What a model learnt: attention maps against the plain reference, and what is made of them."""

import pytest
import torch

from tests.model.tiny_models import BASE, OPTIONS, force, picture, tiny
from vitkern import inspection
from vitkern.blocks import Block


def plain_maps(model, image):
    """By hooks on the modules of the reference path: (L, B, H, S, S)."""
    found = []

    def watch(attn, given, _):
        x, bias = given[0], given[1]
        B, S, D = x.shape
        q, k, _ = attn.qkv(x).view(B, S, 3, attn.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        scores = attn.q_norm(q) @ attn.k_norm(k).mT / (D // attn.heads) ** 0.5
        found.append((scores if bias is None else scores + bias).softmax(-1))

    hooks = [block.attn.register_forward_hook(watch) for block in model.blocks]
    with torch.no_grad():
        model.reference_forward(image)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def has_plain_qkv(option):
    c = BASE.replace(**OPTIONS[option])
    return c.depth and c.rope == "none" and c.key_bias and not c.separate_qkv


OTHERWISE = [name for name in OPTIONS if not has_plain_qkv(name) and name != "no-blocks"]


@pytest.mark.parametrize("option", OTHERWISE)
def test_maps_are_those_that_dropout_is_given(option):
    model = tiny(**OPTIONS[option])
    image, given = picture(model, B=2), []
    hooks = [
        block.attn.attn_drop.register_forward_hook(lambda module, x, y: given.append(y))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(image)  # module by module, because of the hooks
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(model.attention_maps(image), torch.stack(given))


@pytest.mark.parametrize("option", filter(has_plain_qkv, OPTIONS))
def test_maps_are_those_of_the_modules(option):
    model = tiny(**OPTIONS[option])
    image = picture(model, B=2)
    maps, wanted = model.attention_maps(image), plain_maps(model, image)
    torch.testing.assert_close(maps, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))


@pytest.mark.parametrize("path", ["reference", "fused"])  # the engine has no rows between blocks
def test_on_every_path(path):
    model = tiny()
    image = picture(model, B=2)
    wanted = plain_maps(model, image)
    maps = force(model, path, image).attention_maps(image)
    torch.testing.assert_close(maps, wanted, atol=2e-5, rtol=1e-4)


def test_layers_and_heads_are_chosen_in_their_order():
    model = tiny()
    image = picture(model, B=2)
    whole = model.attention_maps(image)
    assert torch.equal(
        model.attention_maps(image, layers=[-1, 0, 0], heads=1), whole[[2, 0, 0], :, 1:]
    )
    assert torch.equal(model.attention_maps(image, layers=1), whole[1:2])


def test_rows_are_computed_in_parts(monkeypatch):
    model = tiny()
    image = picture(model, B=2)
    whole = model.attention_maps(image)
    monkeypatch.setattr(inspection, "QUERIES", 7)
    torch.testing.assert_close(model.attention_maps(image), whole)


def test_a_training_model_stays_one():
    model = tiny(dropout=0.5, attention_dropout=0.5).train()
    image = picture(model, B=1)
    assert torch.equal(model.attention_maps(image), model.attention_maps(image))
    assert model.training and all(block.training for block in model.blocks)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"layers": 3}, "layers 3: there are 3"),
        ({"heads": [0, -3]}, "heads -3: there are 2"),
        ({"layers": ["x"]}, "layers 'x'"),
    ],
)
def test_what_is_not_there_is_refused(changes, said):
    model = tiny()
    with pytest.raises(ValueError, match=said):
        model.attention_maps(picture(model, B=1), **changes)


def test_enormous_answers_are_refused(monkeypatch):
    model = tiny()
    monkeypatch.setattr(inspection, "LARGEST_MAPS", 1000)
    with pytest.raises(ValueError, match="ask for fewer layers"):
        model.attention_maps(picture(model, B=1))


def test_foreign_blocks_and_bad_images_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match="expected \\(B, C, Y, X\\)"):
        model.attention_maps(torch.zeros(3, 24, 16))
    model.blocks[1] = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"blocks\.1 is a Identity"):
        model.attention_maps(picture(model, B=1))


def uniform(model):
    """Every query attends to every key alike."""
    with torch.no_grad():
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    return model


def test_distances_of_uniform_attention():
    model = uniform(tiny())
    found = inspection.attention_distances(model, picture(model, B=2))
    places = [(4 * y, 4 * x) for y in range(6) for x in range(4)]
    wanted = sum(((a - c) ** 2 + (b - d) ** 2) ** 0.5 for a, b in places for c, d in places)
    torch.testing.assert_close(found, torch.full((3, 2), wanted / len(places) ** 2))


@pytest.mark.parametrize("option", ["plain", "registers", "no-class-token", "stem"])
def test_rollout_is_the_product_of_the_steps(option):
    model = tiny(**OPTIONS[option])
    image = picture(model, B=2)
    joint = torch.eye(model.config.tokens)
    for maps in plain_maps(model, image):
        joint = (maps.mean(1) + torch.eye(model.config.tokens)) / 2 @ joint
    T = model.config.prefix_tokens
    row = joint[:, 0, T:] if model.config.class_token else joint[:, T:, T:].mean(1)
    wanted = row / row.amax(1, keepdim=True)
    found = inspection.rollout(model, image)
    torch.testing.assert_close(found, wanted.view(2, *model.config.grid), atol=1e-5, rtol=1e-4)


def test_filters_are_orthogonal_and_explain_the_most_first():
    model = tiny()
    found = inspection.filters(model, 5).flatten(1)
    torch.testing.assert_close(found @ found.mT, torch.eye(5), atol=1e-5, rtol=0)
    weight = model.patch_embed.proj.weight.detach().flatten(1)
    spread = ((weight - weight.mean(0)) @ found.mT).square().sum(0)
    assert torch.equal(spread.sort(descending=True).values, spread)


def test_a_position_is_most_like_itself():
    model = tiny()
    found = inspection.position_similarity(model)
    assert found.shape == (6, 4, 6, 4)
    same = found.view(24, 24).diagonal()
    torch.testing.assert_close(same, torch.ones(24))
    assert found.abs().max() <= 1 + 1e-5
    assert inspection.position_similarity(tiny(position="none")) is None


def test_frozen_parts_stay_frozen():
    model = tiny(dropout=0.5).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    inspection.rollout(model, picture(model, B=1))
    assert [module.training for module in model.modules()] == modes


def test_masks_and_timms_numbers_know_the_stem():
    model = tiny(**OPTIONS["stem-patches"])
    S, image = model.config.tokens, picture(model, B=1)
    mask = torch.ones(S, S, dtype=torch.bool)
    torch.testing.assert_close(model(image, attn_mask=mask), model(image), atol=1e-5, rtol=1e-4)
    assert model.feature_info[0]["reduction"] == 16
    assert model.pretrained_cfg["input_size"] == (3, 48, 32)
    assert model.pretrained_cfg["first_conv"] == "patch_embed.backbone.0"
