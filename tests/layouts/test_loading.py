"""vitkern.load: heads, sizes, dtypes, folders, shards, adapters, names, and its errors."""

import json
import sys
import types

import numpy as np
import pytest
import torch

import vitkern
from tests.layouts import originals
from tests.model.tiny_models import picture, tiny
from vitkern import ViT
from vitkern.weights.layouts.base import Refused

save_file = pytest.importorskip("safetensors.torch").save_file
SQUARE = {"image_size": 16, "registers": 0}


@pytest.fixture
def model():
    return tiny(**SQUARE)


@pytest.fixture
def path(model, tmp_path):
    vitkern.save(model, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def same(a, b):
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in mine.items())


@pytest.mark.parametrize("option", ["position-relative", "registers", "sincos", "tanh", "odd"])
def test_save_and_load_keep_everything(option, tmp_path):
    changes = {
        "position-relative": {"position": "relative"},
        "registers": {"registers": 2, "position_covers_prefix": False, "layer_scale": 0.1},
        "sincos": {"position": "sincos_2d", "class_token": False, "pool": "mean"},
        "tanh": {"head": "tanh", "representation_size": 24, "mean": (0.5,) * 3, "std": (0.2,) * 3},
        "odd": {"qk_norm": True, "position": "learned_2d", "qkv_bias": False},
    }[option]
    model = tiny(**changes)
    assert vitkern.save(model, tmp_path / "a.safetensors") == "timm"
    again = ViT.from_pretrained(tmp_path / "a.safetensors")
    assert same(model, again) and again.config == model.config and not again.training


def test_head_is_kept_dropped_or_replaced(model, path):
    image = picture(model)
    features = model.forward_head(model.forward_features(image), pre_logits=True)
    assert torch.equal(vitkern.load(path)(image), model(image))
    assert same(vitkern.load(path, classes=37), model)
    torch.testing.assert_close(vitkern.load(path, classes=0)(image), features)
    new = vitkern.load(path, classes=4)
    assert new(image).shape == (5, 4) and not new.head.weight.any() and new.config.classes == 4


def test_positions_move_to_another_size(model, path):
    pytest.importorskip("scipy")
    import scipy.ndimage

    assert vitkern.load(path, image_size=24).config.grid == (6, 6)
    moved = vitkern.load(path, image_size=(24, 32), interpolation="bilinear")
    grid = model.pos_embed[0, 1:].detach().view(4, 4, 32).numpy()
    wanted = scipy.ndimage.zoom(grid, (6 / 4, 8 / 4, 1), order=1)  # the paper's own code
    np.testing.assert_allclose(moved.pos_embed[0, 1:].detach().view(6, 8, 32), wanted, atol=1e-5)
    model.set_input_size((24, 32))
    assert torch.equal(vitkern.load(path, image_size=(24, 32)).pos_embed, model.pos_embed)
    relative = tiny(position="relative")
    state = relative.state_dict()
    relative.set_input_size((32, 32))
    again = vitkern.load(state, image_size=(24, 16), heads=2)
    assert same(again, tiny(position="relative"))
    with pytest.raises(ValueError, match=r"image_size 17 must be a multiple"):
        vitkern.load(path, image_size=17)


def test_dtype_and_precision(path):
    half = vitkern.load(path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    fast = vitkern.load(path, precision="bf16")
    assert fast.precision == "bf16" and fast.dtype == torch.float32


def test_weights_are_mapped_and_private(model, path):
    """Training changes the model, not the file; saving over the file does not change the model."""
    loaded = vitkern.load(path)
    before = path.read_bytes()
    with torch.no_grad():
        for p in loaded.parameters():
            p.mul_(2)
    assert path.read_bytes() == before
    other = vitkern.load(path)
    vitkern.save(loaded, path)
    assert same(other, model) and same(vitkern.load(path), loaded)


def test_a_state_dict_is_copied(model):
    state = model.state_dict()
    loaded = vitkern.load(state, heads=2)
    with torch.no_grad():
        loaded.head.weight.zero_()
    assert state["head.weight"].any()
    loaded = vitkern.load({"model": state, "epoch": 3}, heads=2)
    with torch.no_grad():
        loaded.head.weight.zero_()
    assert state["head.weight"].any()


def test_misfits_are_listed(model, tmp_path):
    state = model.state_dict()
    for i in range(3):
        del state[f"blocks.{i}.norm2.weight"], state[f"blocks.{i}.mlp.fc2.bias"]
    state |= {f"extra.{i}": torch.zeros(1) for i in range(8)}
    state["norm.weight"] = torch.zeros(7)
    with pytest.raises(ValueError) as error:
        vitkern.load(state, heads=2)
    text = str(error.value)
    assert "nearest layout: timm's ViT" in text and "missing (6): blocks.0.norm2.weight" in text
    assert "unexpected (8): extra.0, extra.1" in text and "and 3 more" in text
    assert "wrong shape (1): norm.weight has shape (7,), norm.weight needs (32,)" in text
    loaded, report = vitkern.load(state, heads=2, strict=False)
    assert str(report) in text and len(report.missing) == 6 and not report.fits
    assert (
        torch.equal(loaded.norm.weight, torch.ones(32)) and loaded(picture(model)).isfinite().all()
    )
    whole, report = vitkern.load(model.state_dict(), heads=2, strict=False)
    assert report.fits and same(whole, model) and str(report) == "timm's ViT: everything fits"


def test_unknown_names_say_what_is_near(model):
    state = {f"x.{n}.y": t for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"no layout that is known: none is near; its \d+ tensors"):
        vitkern.load(state)
    state = {n: t for n, t in model.state_dict().items() if "qkv" not in n}
    with pytest.raises(ValueError, match=r"nearest is timm's ViT \(100% of the names\)"):
        vitkern.load(state)


def test_folders_and_missing_files_are_told_apart(model, path, tmp_path):
    assert same(vitkern.load(tmp_path), model)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty is a directory; .* found none"):
        vitkern.load(empty)
    for name in ("a.pt", "b.pt"):
        torch.save(model.state_dict(), empty / name)
    with pytest.raises(ValueError, match=r"several: a\.pt, b\.pt; name one of them"):
        vitkern.load(empty)
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="is a directory"):
        vitkern.save(model, folder)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        vitkern.load(tmp_path / "missing.safetensors")
    with pytest.raises(TypeError, match=r"no field 'head_count'; did you mean"):
        vitkern.load(model.state_dict(), head_count=2)
    with pytest.raises(TypeError, match="expected a path, a name or a state dict, got a int"):
        vitkern.load(3)


def test_shards_are_read_together(model, tmp_path):
    state = model.state_dict()
    names = sorted(state)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: state[name] for name in some}, tmp_path / file)
    places = {name: file for file, some in parts.items() for name in some}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert same(vitkern.load(tmp_path, heads=2), model)
    assert same(vitkern.load(index, heads=2), model)
    places.pop(names[0])
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="does not say that model-1"):
        vitkern.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {**places, names[0]: "model-2.safetensors"}}))
    with pytest.raises(ValueError, match="does not say that"):
        vitkern.load(tmp_path)


def test_what_vitkern_lacks_is_named(tmp_path):
    pieces = {
        "another gated MLP than those of timm and DINOv2": {
            "blocks.0.mlp.w1.weight": torch.ones(3)
        },
    }
    for piece, extra in pieces.items():
        with pytest.raises(Refused, match=f"needs {piece}, which vitkern does not have yet$"):
            vitkern.load(tiny(**SQUARE).state_dict() | extra)


@pytest.mark.full
@pytest.mark.parametrize("stem, image", [("r26_s32", 64), ("r50", 48), ("r", 64)])
def test_jax_hybrid_goes_to_npz_and_back(stem, image, tmp_path):
    patch = {"patch_size": 8 if stem == "r" else 1, "image_size": image}
    model = tiny(stem=stem, **patch, activation="gelu_tanh", mean=(0.5,) * 3, std=(0.5,) * 3)
    vitkern.save(model, tmp_path / "hybrid.npz", layout="jax")
    again = vitkern.load(tmp_path / "hybrid.npz")
    assert again.config == model.config
    arrays = dict(np.load(tmp_path / "hybrid.npz"))
    assert arrays["conv_root/kernel"].shape == (7, 7, 3, 64)
    pixels = torch.randn(1, 3, image, image)
    with torch.inference_mode():
        torch.testing.assert_close(again(pixels), model(pixels), rtol=1e-5, atol=1e-5)


def test_jax_hybrid_of_another_resnet_is_named(tmp_path):
    path = originals.WRITERS["jax"](originals.MODELS["jax"](), tmp_path)
    arrays = dict(np.load(path)) | {"conv_root/kernel": np.zeros((7, 7, 3, 64), np.float32)}
    arrays["block1/unit7/conv1/kernel"] = np.zeros((1, 1, 64, 64), np.float32)
    np.savez(tmp_path / "hybrid.npz", **arrays)
    with pytest.raises(Refused, match=r"a ResNet of \(7,\) blocks"):
        vitkern.load(tmp_path / "hybrid.npz")


def test_fixed_positions_of_big_vision(tmp_path):
    """Not stored: the last of its waves is 1/10000 exactly, unlike MoCo v3's."""
    path = originals.WRITERS["big-vision"](originals.MODELS["big-vision"](), tmp_path)
    arrays = {n: a for n, a in np.load(path).items() if "pos_embedding" not in n}
    np.savez(tmp_path / "fixed.npz", **arrays)
    loaded = vitkern.load(tmp_path / "fixed.npz", image_size=32)
    y, x = np.mgrid[:4, :4].reshape(2, -1, 1)
    omega = 1 / 10000.0 ** (np.arange(16) / 15)
    wanted = np.concatenate(
        [np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)], 1
    )
    np.testing.assert_allclose(loaded.pos_embed[0].detach(), wanted, atol=1e-6)


def test_bfloat16_arrays_of_jax(tmp_path):
    path = originals.WRITERS["jax"](originals.MODELS["jax"](), tmp_path)
    loaded = vitkern.load(path, dtype=torch.bfloat16)
    arrays = {
        n: torch.from_numpy(a.copy()).bfloat16().view(torch.int16).numpy().view("V2")
        for n, a in np.load(path).items()
    }
    np.savez_compressed(tmp_path / "half.npz", **arrays)
    half = vitkern.load(tmp_path / "half.npz")
    assert half.dtype == torch.bfloat16 and same(half, loaded)


def test_packed_files_are_loaded_as_they_are(model, tmp_path):
    model.save_packed(tmp_path / "packed.safetensors", precision="int8")
    loaded = vitkern.load(tmp_path / "packed.safetensors")
    assert loaded.precision == "int8"
    model.precision = "int8"
    with torch.no_grad():
        assert torch.equal(loaded(picture(model)), model(picture(model)))
    with pytest.raises(Refused, match="is a packed model, whose classes cannot be chosen"):
        vitkern.load(tmp_path / "packed.safetensors", classes=3)


# ---- names ----


def test_a_configuration_is_no_checkpoint():
    with pytest.raises(ValueError, match="names a configuration, which has no weights"):
        vitkern.load("B/16")


def test_hub_names_are_fetched(model, tmp_path, monkeypatch):
    vitkern.save(model, tmp_path / "model.safetensors")
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    names = ["README.md", "pytorch_model.bin", "model.safetensors", "config.json", "run.py"]
    hub = types.SimpleNamespace(
        list_repo_files=lambda name: names, snapshot_download=snapshot_download
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert same(vitkern.load("someone/a-vit"), model)
    assert same(vitkern.load("vit_tiny_patch16_224.augreg_in1k"), model)
    assert [name for name, _ in asked] == ["someone/a-vit", "timm/vit_tiny_patch16_224.augreg_in1k"]
    assert "run.py" not in asked[0][1]["allow_patterns"]
    assert "pytorch_model.bin" not in asked[0][1]["allow_patterns"]


def test_a_hub_that_cannot_be_asked_is_said(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route to host")

    hub = types.SimpleNamespace(list_repo_files=fail, snapshot_download=fail)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(FileNotFoundError, match=r"Hub could not be asked for a/b: .*no route"):
        vitkern.load("a/b")


# ---- adapters ----


def change(adapted):
    """As training would: B starts at zero, and modules that are trained whole as copies."""
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                p.add_(torch.randn_like(p) * 0.1)


@pytest.mark.full  # peft takes seconds to import
@pytest.mark.parametrize("rslora", [False, True])
def test_lora_of_a_timm_model_is_merged(rslora, tmp_path):
    timm_models = pytest.importorskip("tests.layouts.foreign_models")
    pytest.importorskip("timm", exc_type=ImportError)
    peft = pytest.importorskip("peft", exc_type=ImportError)
    theirs = timm_models.timm_vit()
    save_file(theirs.state_dict(), tmp_path / "base.safetensors")
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["qkv", "fc1"], modules_to_save=["head"],
        use_rslora=rslora, alpha_pattern={"fc1": 3},
    )  # fmt: skip
    adapted = peft.get_peft_model(theirs, settings).eval()
    change(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    image = torch.randn(2, 3, 32, 32)
    loaded = vitkern.load(tmp_path / "adapter", base=tmp_path / "base.safetensors", heads=2)
    with torch.no_grad():
        torch.testing.assert_close(loaded(image), adapted(image), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="names no base model"):
        vitkern.load(tmp_path / "adapter")


def test_lora_is_added_to_its_base(model, path, tmp_path):
    a, b = torch.randn(2, 32), torch.randn(96, 2)
    name = "base_model.model.blocks.1.attn.qkv.lora_"
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "lora_alpha": 6, "base_model_name_or_path": str(path)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    loaded = vitkern.load(folder)
    wanted = model.blocks[1].attn.qkv.weight + 3 * (b @ a)
    torch.testing.assert_close(loaded.blocks[1].attn.qkv.weight, wanted)
    assert torch.equal(loaded.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@pytest.mark.full
def test_lora_of_a_hugging_face_model_is_merged(tmp_path):
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", exc_type=ImportError)
    from tests.layouts.foreign_models import SIZES, transformers_model

    theirs = transformers_model("ViTForImageClassification", "ViTConfig", SIZES | {"num_labels": 5})
    theirs.save_pretrained(tmp_path / "base")
    theirs.name_or_path = str(tmp_path / "base")
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "fc2"], modules_to_save=["classifier"]
    )
    adapted = peft.get_peft_model(theirs, settings).eval()
    change(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    image = torch.randn(2, 3, 32, 32)
    loaded = vitkern.load(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(image), adapted(image).logits, rtol=1e-4, atol=1e-4)


def test_other_adapters_are_refused(model, path, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    about = {"peft_type": "IA3", "base_model_name_or_path": str(path)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="an adapter of type 'IA3'; only LoRA's are merged"):
        vitkern.load(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**about, "peft_type": "LORA"}))
    lora = "base_model.model.blocks.0.attn.qkv.lora_"
    for tensors, said in (
        ({f"{lora}A.weight": torch.ones(2, 32)}, "one of two matrices"),
        ({f"{lora}A.weight": torch.ones(2, 9), f"{lora}B.weight": torch.ones(96, 2)}, "matrices"),
        ({f"{lora}A.weight": torch.ones(2), f"{lora}B.weight": torch.ones(96)}, "matrices"),
        ({f"{lora}magnitude_vector": torch.ones(2)}, "only plain LoRA"),
        ({"base_model.model.x.lora_A.weight": torch.ones(2, 9)}, "which .* does not have"),
    ):
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=said):
            vitkern.load(folder)
