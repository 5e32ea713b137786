"""Bad input: each is refused with an error that says what came, what was wanted and what to do."""

import pytest
import torch
from torch import nn

import vitkern
from tests.model.tiny_models import PATHS, picture, tiny
from vitkern import ViT, ViTConfig
from vitkern.config import OPTIONAL, RANGES
from vitkern.weights import timm as timm_weights

BAD_CONFIGS = {
    "width 30 must be a multiple of heads 4": {"width": 30, "heads": 4},
    "image_size 225 must be a multiple of patch_size 16": {"image_size": 225},
    "image_size must be a positive integer or a pair": {"image_size": (224, 224, 3)},
    "depth must be an integer of at least 0": {"depth": -1},
    "heads must be an integer of at least 1": {"heads": 0},
    "classes must be an integer of at least 0, not 2.5": {"classes": 2.5},
    "registers must be an integer": {"registers": True},
    "pool must be one of token, mean, map, none, not 'max'": {"pool": "max"},
    "position must be one of": {"position": "rope"},
    "activation must be one of": {"activation": "relu"},
    "head must be one of": {"head": "mlp"},
    "mci, not 'resnet'": {"stem": "resnet"},
    "mci, not ['conv']": {"stem": ["conv"]},
    "of patch_size 16, times the stem's stride 8": {"stem": "conv"},
    "\"conv\" needs a width that 32 divides": {"stem": "conv", "width": 48, "patch_size": 4},
    "final_norm must be one of": {"final_norm": "both"},
    "reads the class token": {"class_token": False},
    "dropout must be at least 0 and below 1": {"dropout": 1.0},
    "drop_path must be at least 0 and below 1, not -0.1": {"drop_path": -0.1},
    "norm_eps must be positive": {"norm_eps": 0.0},
    "sincos_2d' needs a width that 4 divides": {"position": "sincos_2d", "width": 30, "heads": 2},
    "needs pool=\"token\" and at least one class": {"head": "token_norm", "classes": 0},
    "mean and std go together": {"mean": (0.5, 0.5, 0.5)},
    "std must have one number per channel (3)": {"mean": (0.5,) * 3, "std": (0.5,)},
    "std must not contain 0": {"mean": (0.5,) * 3, "std": (0.5, 0.0, 0.5)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_bad_config_is_refused(message):
    with pytest.raises(ValueError) as error:
        ViTConfig(**BAD_CONFIGS[message])
    assert message in str(error.value) and str(error.value).startswith("ViTConfig: ")


@pytest.mark.parametrize("name", RANGES)
def test_absurd_numbers_are_refused_at_once(name):
    """By the record itself: building such a model would take hours, or all memory."""
    for value in (10**30, 10**5000, RANGES[name][1] + 1, 2**63):
        with pytest.raises(
            ValueError, match=f"ViTConfig: {name} must be at most {RANGES[name][1]}"
        ):
            ViTConfig(**{name: value})
    for value in (-1, -(10**30), -(10**5000), True, 1.5, float("nan"), "12", b"1", (), (1,), {}):
        with pytest.raises(ValueError, match=f"ViTConfig: {name} must be"):
            ViTConfig(**{name: value})
    if name not in OPTIONAL:
        with pytest.raises(ValueError, match=f"ViTConfig: {name} must be"):
            ViTConfig(**{name: None})


@pytest.mark.parametrize(
    "size",
    [(224, True), (224, None), (224, "16"), (224, 16.0), (0, 16), (-16, 16), (16, 10**5000), [[]]],
    ids=lambda size: f"{type(size[-1]).__name__}",
)
def test_absurd_image_sizes_are_refused(size):
    with pytest.raises(ValueError, match="ViTConfig: image_size must be"):
        ViTConfig(image_size=size, patch_size=1)
    with pytest.raises(ValueError, match="ViTConfig: image_size must be"):
        tiny().set_input_size(size)


FLOATS = ["norm_eps", "layer_scale", "dropout", "attention_dropout", "projection_dropout"]
FLOATS += ["head_dropout", "drop_path"]


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_that_no_float_holds_are_refused(name):
    for value in (10**400, -(10**400), float("inf"), float("nan"), "0.1", True, 1j, [0.1]):
        with pytest.raises(ValueError, match=f"ViTConfig: {name} must be a finite number"):
            ViTConfig(**{name: value})
    with pytest.raises(ValueError, match="ViTConfig: mean must be a finite number"):
        ViTConfig(mean=(10**400,) * 3, std=(1.0,) * 3)


@pytest.mark.parametrize("value", [None, 3, ["token"], b"token", torch.zeros(3)], ids=str)
def test_choices_are_texts(value):
    for name in ("pool", "position", "final_norm", "activation", "head"):
        with pytest.raises(ValueError, match=f"ViTConfig: {name} must be one of"):
            ViTConfig(**{name: value})
    with pytest.raises(TypeError, match=r"ViTConfig.named: name must be a str"):
        ViTConfig.named(value)


@pytest.mark.parametrize(
    "name", ["B/\u00b2", "B/" + "9" * 5000, "vit_base_patch16_" + "9" * 5000, "x" * 100_000]
)
def test_names_with_absurd_numbers_are_unknown(name):
    with pytest.raises(ValueError, match="unknown variant"):
        ViTConfig.named(name)


@pytest.mark.parametrize(
    "name, hint",
    [("B/17", "B/16"), ("vit_bas_patch16_224", "vit_base_patch16_224"), ("b/16", "B/16"),
     ("vit_base_patch16_225", "vit_base_patch16_224"), ("alexnet", "known: "), ("", "known: ")],
)  # fmt: skip
def test_unknown_variant_lists_close_names(name, hint):
    with pytest.raises(ValueError, match="unknown variant") as error:
        ViT(name)
    assert hint in str(error.value)


def test_unknown_field_lists_close_fields():
    with pytest.raises(TypeError, match="no field 'number_of_classes'"):
        ViT("Ti/16", number_of_classes=10)
    with pytest.raises(TypeError, match="did you mean image_size"):
        ViT("Ti/16", image_sizes=10)
    with pytest.raises(TypeError, match="must be a ViTConfig or a name, not dict"):
        ViT({"width": 3})


BAD_IMAGES = {
    "add a batch axis with image[None]": lambda image: image[0],
    "expected (B, C, Y, X)": lambda image: image.flatten(),
    "image has 1 channels, the model takes 3": lambda image: image[:, :1],
    "image.permute(0, 3, 1, 2)": lambda image: image.permute(0, 2, 3, 1),
    "model.set_input_size((20, 16))": lambda image: image[:, :, :20],
    "image is 24x15 pixels": lambda image: image[..., :15],
    "the model takes 24x16": lambda image: image[..., :0],
    "image is torch.float64, the model torch.float32": lambda image: image.double(),
    "image.to(torch.float32)": lambda image: image.half(),
    "image is torch.int64, expected torch.float32 or uint8": lambda image: image.long(),
    "image is torch.bool": lambda image: image > 0,
    "image is torch.complex64": lambda image: image + 1j,
    "uint8 images need the pixel mean and std": lambda image: image.byte(),
    "image has layout torch.sparse_coo": lambda image: image.to_sparse(),
    "image is on meta, the model on cpu": lambda image: image.to("meta"),
    "image must be a torch.Tensor, got list": lambda image: image.tolist(),
}


@pytest.mark.parametrize("path", ["auto", "fused", "reference"])
@pytest.mark.parametrize("message", BAD_IMAGES)
def test_bad_image_is_refused(message, path):
    model = tiny()
    model.path = path
    for call in (model, model.forward_features, model.forward_intermediates, model.explain):
        with torch.no_grad(), pytest.raises((ValueError, TypeError)) as error:
            call(BAD_IMAGES[message](picture(model)))
        assert message in str(error.value) and str(error.value).startswith("ViT: ")


def test_dynamic_size_still_needs_whole_patches():
    model = tiny(dynamic_image_size=True)
    with pytest.raises(ValueError, match="multiple of the patch size 4; resize or crop"):
        model(torch.zeros(1, 3, 24, 18))
    with pytest.raises(ValueError, match="multiple of the patch size"):
        model(torch.zeros(1, 3, 0, 16))


def test_impossible_path_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="must be one of auto, engine, fused, reference"):
        model.path = "fast"
    with pytest.raises(ValueError, match="must be fp32, tf32, bf16, int8 or None"):
        model.precision = "int4"
    model.path = "engine"
    with pytest.raises(RuntimeError, match="path 'engine' is impossible: gradients are enabled"):
        model(picture(model))
    model.path = "fused"
    model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"path 'fused' is impossible: blocks.0 has a hook"):
        model(picture(model))


def test_bad_intermediates_are_refused():
    model = tiny()
    for indices in (0, 4, [3], [-4]):
        with pytest.raises(ValueError, match="exist"):
            model.forward_intermediates(picture(model), indices)
    with pytest.raises(ValueError, match="NCHW or NLC, not 'NHWC'"):
        model.forward_intermediates(picture(model), output_fmt="NHWC")


def test_bad_changes_leave_the_model_as_it_was():
    model = tiny()
    image = picture(model)
    want = model(image)
    for change in (
        lambda: model.set_input_size((25, 16)),
        lambda: model.set_input_size(24, patch_size=0),
        lambda: model.reset_classifier(-1),
        lambda: model.reset_classifier(3, "max"),
    ):
        with pytest.raises(ValueError, match="ViTConfig"):
            change()
    assert torch.equal(model(image), want)
    headless = tiny(class_token=False, pool="mean")
    with pytest.raises(ValueError, match="reads the class token"):
        headless.reset_classifier(3, "token")


# ---- weights ----


def test_checkpoint_of_another_size_names_the_way_out():
    model, big = tiny(), tiny(image_size=(32, 32))
    with pytest.raises(RuntimeError, match=r"set_input_size.*resize_positions=True"):
        model.load_state_dict(big.state_dict())
    timm_weights.load(model, big.state_dict(), resize_positions=True)
    big.set_input_size((24, 16))
    assert torch.equal(model.pos_embed, big.pos_embed)
    odd = tiny(image_size=(32, 20))
    with pytest.raises(ValueError, match="not a square grid"):
        timm_weights.load(model, odd.state_dict(), resize_positions=True)


def test_checkpoint_of_other_classes_names_the_way_out():
    with pytest.raises(ValueError, match=r"has 5 classes, the model 37.*reset_classifier"):
        timm_weights.load(tiny(), tiny(classes=5).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        timm_weights.load(tiny(), {})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*dist_token"):
        timm_weights.load(tiny(), {"dist_token": torch.zeros(1)})


def test_wrapped_checkpoints_load():
    state, model = tiny(seed=3).state_dict(), tiny()
    timm_weights.load(
        model, {"epoch": 3, "state_dict": {f"module.{n}": p for n, p in state.items()}}
    )
    assert torch.equal(model.head.weight, state["head.weight"])


class Surprise:
    def __reduce__(self):
        return print, ("this must not run",)


def test_damaged_files_are_refused(tmp_path, capsys):
    model, good = tiny(), tmp_path / "good.pt"
    torch.save(model.state_dict(), good)
    timm_weights.load(model, good)
    safetensors = pytest.importorskip("safetensors.torch")
    fine = tmp_path / "good.safetensors"
    safetensors.save_file(model.state_dict(), fine)
    timm_weights.load(model, str(fine))
    for source, suffix in ((good, ".pt"), (fine, ".safetensors")):
        for name, content in {
            "half": source.read_bytes()[: source.stat().st_size // 2],
            "empty": b"",
            "text": b"hello, this is no checkpoint at all",
        }.items():
            path = tmp_path / (name + suffix)
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"timm.read: .*" + name):
                timm_weights.load(model, path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        timm_weights.load(model, tmp_path / "missing.pt")
    torch.save({"weights": Surprise()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="can run code"):
        timm_weights.load(model, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        timm_weights.load(model, tmp_path / "list.pt")
    assert "must not run" not in capsys.readouterr().out


def test_accelerate_refuses_what_it_would_change():
    with pytest.raises(ValueError, match="precision must be fp32, tf32, bf16, int8 or None"):
        vitkern.accelerate(tiny(), "int4")
    with pytest.raises(TypeError, match="expected a ViT, got str"):
        vitkern.accelerate("B/16")
    with pytest.raises(ValueError, match="a Linear is not a timm VisionTransformer"):
        vitkern.accelerate(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"float64, expected float32.*convert the model"):
        vitkern.accelerate(tiny(torch.float64))
    model = tiny()
    model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="norm has a hook"):
        vitkern.accelerate(model)
    model = tiny()
    model.blocks[0].attn.proj = nn.Sequential(model.blocks[0].attn.proj)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.proj is a Sequential"):
        vitkern.accelerate(model)


ODD_ROWS = {
    "cls_token": {},
    "reg_token": {"registers": 2},
    "pos_embed": {},
    "pos_embed_y": {"position": "learned_2d"},
    "blocks.0.attn.relative_position_bias_table": {"position": "relative"},
}


@pytest.mark.parametrize("shape", [(), (32,), (1, 0, 32), (2, 3, 32)], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ODD_ROWS)
def test_tokens_and_positions_of_another_shape_are_refused(name, path, shape):
    model = tiny(**ODD_ROWS[name])
    image = picture(model)
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(torch.ones(shape)))
    model.path = path
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match="shape"):
        model(image)


def test_a_weight_that_is_none_is_refused_by_its_layer():
    model = tiny()
    image = picture(model)
    model.patch_embed.proj.weight = None
    with pytest.raises(TypeError, match="NoneType"):
        model(image)
