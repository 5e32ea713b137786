"""Fine-tuning and probing start from any layout that `vitkern.load` reads, not timm's alone."""

import pytest
import torch

import vitkern
from tests.layouts.foreign_models import CASES
from tests.layouts.test_layouts import made
from tests.train.small_sets import pictures, write_cifar
from vitkern import ViT
from vitkern.__main__ import main
from vitkern.image_files import NORMALISATIONS
from vitkern.train import build
from vitkern.train.settings import parse

pytest.importorskip("PIL")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

SIZES = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "heads": 2, "mlp_width": 128}
LAYOUTS = ("jax", "big-vision", "dino", "dinov2", "mae", "open-clip", "torchvision", "hf-vit",
           "timm")  # fmt: skip


@pytest.fixture
def foreign(request, tmp_path_factory):
    """The case, another project's model, and the file or folder that it wrote."""
    return CASES[request.param], *made(request.param, tmp_path_factory.mktemp(request.param))


def settings(path, **changes):
    return parse({"model": {"name": "Ti/8", "weights": str(path), **SIZES, **changes}}, "test")


@pytest.mark.parametrize("foreign", LAYOUTS, indirect=True)
def test_training_starts_from_the_foreign_model(foreign):
    """The same results before the first step, a new head of zeros, and gradients everywhere."""
    case, theirs, path = foreign
    image = torch.randn(2, 3, 32, 32)
    kept = build.from_weights(path, "Ti/8", SIZES).eval()
    with torch.no_grad():
        wanted = case.ask(theirs, image)
        torch.testing.assert_close(kept(image), wanted, rtol=1e-3, atol=1e-3)

    model = build.model(settings(path, dropout=0.1).model, "half", 7)
    assert model.config.classes == 7 and not model.head.weight.any()
    assert model.config.dropout == 0.1 and model.config.mean == NORMALISATIONS["half"][0]
    assert torch.equal(model.blocks[1].mlp.fc1.weight, kept.blocks[1].mlp.fc1.weight)
    torch.nn.init.normal_(model.head.weight)
    model(torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.blocks.parameters())


@pytest.mark.parametrize("foreign", ["jax", "hf-vit"], indirect=True)
def test_positions_of_other_layouts_are_resized(foreign):
    *_, path = foreign
    model = build.model(settings(path, image_size=48).model, "half", 7)
    again = vitkern.load(path, classes=7, image_size=48)
    assert model.pos_embed.shape[1] == 1 + 36
    assert torch.equal(model.pos_embed, again.pos_embed)


@pytest.mark.parametrize("foreign", ["jax"], indirect=True)
def test_what_does_not_fit_is_refused(foreign, tmp_path):
    *_, path = foreign
    name = path.name
    with pytest.raises(ValueError, match=rf"{name} is no B/8: its width is 64, not 768"):
        build.from_weights(path, "B/8", {})
    with pytest.raises(ValueError, match=rf"{name} is no Ti/16: its patch_size is 8, not 16"):
        build.from_weights(path, "Ti/16", {k: v for k, v in SIZES.items() if k != "patch_size"})
    with pytest.raises(ValueError, match="classes, the data 7: set new_head = true"):
        keep = settings(path).changed({"model": {"new_head": False}}, "test")
        build.model(keep.model, "half", 7)
    torch.save({"alpha": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="has no layout that is known"):
        build.from_weights(tmp_path / "other.pt", "Ti/8", SIZES)
    vitkern.save_packed(ViT("Ti/8", **SIZES).eval(), tmp_path / "packed.safetensors", "int8")
    with pytest.raises(ValueError, match="is a packed model"):
        build.from_weights(tmp_path / "packed.safetensors", "Ti/8", SIZES)


def test_a_name_decides_what_bare_tensors_do_not_tell(tmp_path):
    """timm's file of a model with another activation looks as any; its name says which."""
    model = ViT("Ti/8", **SIZES, activation="quick_gelu", norm_eps=1e-5, classes=3).eval()
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    options = {**SIZES, "activation": "quick_gelu", "norm_eps": 1e-5}
    again = build.from_weights(tmp_path / "bare.pt", "Ti/8", options).eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(image), model(image))
    with pytest.raises(ValueError, match=r"read as Ti/8.*unexpected|unexpected.*read as Ti/8"):
        scaled = ViT("Ti/8", **SIZES, layer_scale=0.1)
        torch.save(scaled.state_dict(), tmp_path / "scaled.pt")
        build.from_weights(tmp_path / "scaled.pt", "Ti/8", SIZES)


def test_training_never_writes_into_the_file(tmp_path):
    """Tensors of a file are mapped: the model that trains has memory of its own."""
    vitkern.save(ViT("Ti/8", **SIZES).eval(), tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    model = build.from_weights(tmp_path / "a.safetensors", "Ti/8", SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (tmp_path / "a.safetensors").read_bytes() == before
    again = vitkern.load(tmp_path / "a.safetensors")
    assert again.patch_embed.proj.weight.any()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    write_cifar(folder, "binary", *pictures(120, 32, 3, 10), test=40)
    return folder


@pytest.mark.parametrize("foreign", ["jax", "dinov2"], indirect=True)
def test_the_commands_fine_tune_and_probe_it(foreign, data, tmp_path, capsys):
    *_, path = foreign
    flags = ["--weights", path, "--data", data, "--workers", 0, "--out", tmp_path]
    sizes = [word for name, v in SIZES.items() for word in ("--set", f"model.{name}={v}")]
    epochs = ["--model", "Ti/8", "--epochs", 1, "--batch", 20, "--lr", 1e-3]
    assert main([str(word) for word in ["train", *flags, *sizes, *epochs]]) == 0
    (run,) = tmp_path.glob("*/model.safetensors")
    tuned, first = vitkern.load(run), vitkern.load(path, classes=10)
    assert tuned.config.classes == 10 and tuned.head.weight.any()
    moved = tuned.patch_embed.proj.weight - first.patch_embed.proj.weight
    assert 0 < moved.abs().max() < 0.1  # trained from there, by 6 steps of 1e-3
    probing = ["--probes", "least-squares", "--shots", 4]
    assert main([str(word) for word in ["probe", *flags, *probing]]) == 0
    assert "4 a class" in capsys.readouterr().out
