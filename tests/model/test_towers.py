"""Live models of transformers and torchvision, accelerated: the library itself is the reference."""

import pytest
import torch

import vitkern
from vitkern.bench import timm_import

timm_import.prepare()
transformers = pytest.importorskip("transformers", exc_type=ImportError)
torchvision = pytest.importorskip("torchvision", exc_type=ImportError)

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    image_size=32, patch_size=8,
)  # fmt: skip


def of(kind: str, config: str, **changes):
    return getattr(transformers, kind)(getattr(transformers, config)(**{**SIZES, **changes}))


MODELS = {
    "ViT": lambda: of("ViTModel", "ViTConfig"),
    "ViT, no qkv bias": lambda: of("ViTModel", "ViTConfig", qkv_bias=False),
    "ViT classifier": lambda: of("ViTForImageClassification", "ViTConfig"),
    "DeiT": lambda: of("DeiTModel", "DeiTConfig"),
    "DeiT with teacher": lambda: of("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "DINOv2": lambda: of("Dinov2Model", "Dinov2Config"),
    "DINOv2 classifier": lambda: of("Dinov2ForImageClassification", "Dinov2Config"),
    "DINOv2 registers": lambda: of("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    "DINOv2 giant": lambda: of("Dinov2Model", "Dinov2Config", use_swiglu_ffn=True),
    "DINOv3": lambda: of("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4),
    "DINOv3, gated": lambda: of(
        "DINOv3ViTModel", "DINOv3ViTConfig", use_gated_mlp=True, hidden_act="silu"
    ),
    "CLIP": lambda: of("CLIPVisionModel", "CLIPVisionConfig"),
    "CLIP projection": lambda: of("CLIPVisionModelWithProjection", "CLIPVisionConfig"),
    "SigLIP": lambda: of("SiglipVisionModel", "SiglipVisionConfig"),
    "SigLIP, odd size": lambda: of("SiglipVisionModel", "SiglipVisionConfig", image_size=37),
}


def randomised(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model.eval()


def images(model, B=2):
    size = model.config.image_size
    return torch.randn(B, 3, size, size)


def close(got, wanted, tolerance):
    assert type(got) is type(wanted)
    assert got.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=tolerance, atol=tolerance)


def towers_of(model):
    return [m.forward for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize("precision, tolerance", [(None, 1e-4), ("bf16", 0.1)])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_transformers(name, precision, tolerance):
    theirs = randomised(MODELS[name]())
    ours = vitkern.accelerate(theirs, precision)
    assert type(ours) is type(theirs) and ours.state_dict().keys() == theirs.state_dict().keys()
    assert not towers_of(theirs), "the original is as it was"
    image = images(theirs)
    with torch.inference_mode():
        close(ours(image), theirs(image), tolerance)
        close(ours(pixel_values=image), theirs(pixel_values=image), tolerance)
        (tower,) = towers_of(ours)
        assert "path: engine" in tower.vit.explain()
    with torch.no_grad():
        for p in theirs.parameters():  # shared: the result follows
            p.mul_(0.9)
        close(ours(image), theirs(image), tolerance)


@pytest.mark.parametrize("name", ["ViT classifier", "DINOv2", "CLIP", "SigLIP"])
def test_what_a_vit_does_not_give_the_library_does(name):
    theirs = randomised(MODELS[name]())
    theirs.set_attn_implementation("eager")
    ours = vitkern.accelerate(theirs)
    image = images(theirs)
    options = dict(output_hidden_states=True, output_attentions=True)
    with torch.no_grad():
        close(ours(image, **options), theirs(image, **options), 1e-5)
        assert len(ours(image, **options).hidden_states) == 3
        got, wanted = (m(image, return_dict=False) for m in (ours, theirs))
        assert isinstance(got, tuple)
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(image)[0], theirs(image)[0])  # with gradients
    ours(image)[0].sum().backward()
    seen = []
    next(m for n, m in ours.named_modules() if n.endswith("fc1")).register_forward_hook(
        lambda *_: seen.append(1)
    )
    with torch.no_grad():
        ours(image)
    assert seen


def test_a_clip_s_image_tower_is_accelerated_inside_it():
    text = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                num_attention_heads=2, max_position_embeddings=8)  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=SIZES, projection_dim=16)
    theirs = randomised(transformers.CLIPModel(config))
    ours = vitkern.accelerate(theirs)
    given = dict(input_ids=torch.tensor([[1, 2, 3]]), pixel_values=torch.randn(2, 3, 32, 32))
    with torch.no_grad():
        got, wanted = ours(**given), theirs(**given)
    torch.testing.assert_close(got.image_embeds, wanted.image_embeds, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.logits_per_image, wanted.logits_per_image, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_expressed_is_named():
    for changes, reason in ((dict(hidden_act="relu"), "activation 'relu'"),):
        with pytest.raises(ValueError, match=reason):
            vitkern.accelerate(of("Dinov2Model", "Dinov2Config", **changes))
    bert = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    with pytest.raises(ValueError, match="a BertModel has no encoder that vitkern knows"):
        vitkern.accelerate(transformers.BertModel(bert))
    with pytest.raises(ValueError, match="keep_weights=False is of"):
        vitkern.accelerate(MODELS["ViT"](), keep_weights=False)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["ViT", "CLIP"])
def test_the_attention_function_is_transformers(name, masked):
    vitkern.register_with_transformers()
    model = randomised(MODELS[name]())
    image = images(model)
    options = {}
    if masked and name == "ViT":
        options["attention_mask"] = (
            (torch.rand(2, 17) > 0.3).long().index_fill(1, torch.tensor(0), 1)
        )
    wanted = model(image, **options)
    model.set_attn_implementation("vitkern")
    got = model(image, **options)
    close(got, wanted, 1e-4)
    got[0].sum().backward()


def torchvision_model(**changes):
    sizes = dict(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48)
    return randomised(torchvision.models.VisionTransformer(**{**sizes, **changes}))


@pytest.mark.parametrize("changes", [{}, {"representation_size": 24}, {"num_classes": 5}])
def test_outputs_are_torchvisions(changes):
    theirs = torchvision_model(**changes)
    ours = vitkern.accelerate(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image), rtol=1e-4, atol=1e-4)
        assert "path: engine" in ours.forward.vit.explain()
    torch.testing.assert_close(ours(image), theirs(image))


def replace_activation(layer):
    layer.mlp.activation_fn = torch.nn.ReLU()


def replace_forward(layer):
    layer.forward = lambda x, *_, **__: x


def change_eps(layer):
    next(m for m in layer.modules() if isinstance(m, torch.nn.LayerNorm)).eps = 0.5


@pytest.mark.parametrize("change", [replace_activation, replace_forward, change_eps])
@pytest.mark.parametrize("name", ["ViT", "DINOv2", "CLIP"])
def test_models_that_somebody_changed_are_refused(name, change):
    model = randomised(MODELS[name]())
    layers = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    change(layers[0][1])
    with pytest.raises(ValueError, match="accelerate: "):
        vitkern.accelerate(model)


def test_tuples_stay_tuples():
    model = randomised(of("ViTModel", "ViTConfig", return_dict=False))
    pixels = images(model)
    with torch.inference_mode():
        got, wanted = vitkern.accelerate(model)(pixels), model(pixels)
    assert type(got) is type(wanted) is tuple
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)
