"""The real DeiT-Tiny through every layout that can hold it, and back: the same 50 predictions."""

import json

import pytest
import torch

import vitkern
from vitkern import image_files

safetensors = pytest.importorskip("safetensors.torch")
# The other layouts have what DeiT-Tiny has not: LayerScale, a norm before the blocks, JAX's GELU.
LAYOUTS = ("timm", "torchvision", "hf_vit", "shards", "pickle", "wrapped", "npz")


@pytest.fixture(scope="module")
def weights(shared_data):
    file = shared_data / "weights" / "deit_tiny_patch16_224.timm.safetensors"
    if not file.is_file():
        pytest.skip(f"no DeiT-Tiny weights at {file}")
    return file


@pytest.fixture(scope="module")
def photographs(shared_data):
    pytest.importorskip("PIL.Image")
    files = sorted((shared_data / "images" / "imagenet_samples_50").glob("*.jpg"))
    if not files:
        pytest.skip("no photographs")
    labels = torch.tensor([int(file.name.split("_")[0]) for file in files])
    images = [image_files.prepare(image_files.read(file), (224, 224)) for file in files]
    return torch.stack([image.squeeze(0) for image in images]), labels


@pytest.fixture(scope="module")
def wanted(weights, photographs):
    with torch.no_grad():
        return vitkern.load(weights)(photographs[0])


def written(model, name, folder):
    """The path of the model in another layout or another kind of file."""
    state = model.state_dict()
    if name == "shards":
        vitkern.save(model, folder, "hf_vit")
        state = safetensors.load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(state)
        places = {n: f"part-{i % 3}.safetensors" for i, n in enumerate(names)}
        for part in set(places.values()):
            some = {n: state[n] for n in names if places[n] == part}
            safetensors.save_file(some, folder / part)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder
    if name in ("pickle", "wrapped"):
        whole = {"model": {f"module.{n}": t for n, t in state.items()}, "epoch": 300}
        torch.save(state if name == "pickle" else whole, folder / "deit.pth")
        return folder / "deit.pth"
    if name == "npz":  # JAX's GELU is another: read with the right one
        as_jax = vitkern.load(state, activation="gelu_tanh")
        vitkern.save(as_jax, folder / "deit.npz", "jax")
        return folder / "deit.npz"
    path = folder / ("model" if name.startswith("hf_") else "model.safetensors")
    vitkern.save(model, path, name)
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_predictions_are_identical(name, weights, photographs, wanted, tmp_path):
    images, labels = photographs
    options = {"activation": "gelu"} if name == "npz" else {}
    there = vitkern.load(written(vitkern.load(weights), name, tmp_path), **options)
    vitkern.save(there, tmp_path / "back.safetensors")
    back = vitkern.load(tmp_path / "back.safetensors")
    with torch.no_grad():
        got = back(images)
        assert torch.equal(there(images), got)
    tolerance = 1e-4 if name in ("hf_vit", "shards", "npz") else 0  # they say eps and more
    assert (got - wanted).abs().max() <= tolerance
    assert torch.equal(got.argmax(1), wanted.argmax(1)) and (got.argmax(1) == labels).sum() >= 35


@pytest.mark.full
def test_other_libraries_predict_the_same(weights, photographs, wanted, tmp_path):
    images = photographs[0][:16]
    for name, run in (("timm", timm_logits), ("torchvision", torchvision_logits),
                      ("hf_vit", hugging_face_logits)):  # fmt: skip
        path = written(vitkern.load(weights), name, tmp_path)
        with torch.no_grad():
            got = run(path)(images)
        got = getattr(got, "logits", got)
        assert torch.equal(got.argmax(1), wanted[:16].argmax(1)), name
        assert (got - wanted[:16]).abs().max() < 1e-4, name


def timm_logits(path):
    pytest.importorskip("tests.layouts.foreign_models")
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(safetensors.load_file(path))
    return model


def torchvision_logits(path):
    pytest.importorskip("torchvision", exc_type=ImportError)
    from torchvision.models.vision_transformer import VisionTransformer

    sizes = dict(num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768)
    model = VisionTransformer(image_size=224, patch_size=16, **sizes).eval()
    model.load_state_dict(safetensors.load_file(path))
    return model


def hugging_face_logits(path):
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    return transformers.ViTForImageClassification.from_pretrained(path).eval()
