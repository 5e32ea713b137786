"""`vitkern export`: what is written gives what the model gives, wherever it runs."""

import json
import sys

import pytest
import torch

import vitkern
from tests.model.tiny_models import picture, tiny
from vitkern import exporting, trained_file
from vitkern.__main__ import main
from vitkern.cli import export
from vitkern.weights.layouts import BY_NAME

pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny()


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    vitkern.save(model, path)
    return path


@pytest.fixture
def run(capsys):
    def call(*words):
        status = main(["export", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def logits(model, images):
    with torch.inference_mode():
        return model(images)


@pytest.mark.parametrize("to", ["safetensors", "timm", "huggingface", "torchvision"])
def test_weights_come_back_from_every_layout(run, model, weights, tmp_path, to):
    out = tmp_path / ("out" if to == "huggingface" else "out.safetensors")
    status, said, err = run(weights, "-o", out, "--to", to)
    assert status == 0 and f"{out}: weights, " in said, err
    images = picture(model)
    torch.testing.assert_close(logits(vitkern.load(out), images), logits(model, images))


def test_head_and_resolution_are_changed_on_the_way(run, weights, tmp_path):
    out = tmp_path / "out.safetensors"
    words = ("--image-size", "64x32", "--classes", 7, "--dtype", "bfloat16")
    assert run(weights, "-o", out, *words)[0] == 0
    found = vitkern.load(out)
    assert found.config.pixels == (64, 32) and found.config.classes == 7
    assert found.dtype is torch.bfloat16


def test_class_names_are_kept(run, tmp_path):
    out = tmp_path / "out.safetensors"
    assert run(trained_file.SHIPPED, "-o", out)[0] == 0
    found, wanted = trained_file.read(out), trained_file.shipped()
    assert found.classes == wanted.classes and found.eval_crop == wanted.eval_crop
    assert run(trained_file.SHIPPED, "-o", out, "--classes", 0, "--force")[0] == 0
    assert not trained_file.is_one(out)


def test_the_torch_program_is_the_model(run, model, weights, tmp_path):
    out = tmp_path / "out.pt2"
    status, said, _ = run(weights, "-o", out, "--json")
    answer = json.loads(said)
    assert status == 0 and answer["to"] == "torch" and 0 <= answer["difference"] < 1e-4
    program = torch.export.load(out).module()
    for batch in (1, 5):
        images = picture(model)[:1].expand(batch, -1, -1, -1).contiguous()
        torch.testing.assert_close(
            program(images).detach(), logits(model, images), rtol=1e-4, atol=1e-4
        )
    assert not any("vitkern" in str(node.target) for node in torch.export.load(out).graph.nodes)


@pytest.mark.full
@pytest.mark.parametrize("batch", [None, 2])
def test_onnx_runtime_gives_what_the_model_gives(run, model, weights, tmp_path, batch):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    out = tmp_path / "out.onnx"
    fixed = () if batch is None else ("--batch", batch, "--opset", 18)
    status, said, err = run(weights, "-o", out, *fixed)
    assert status == 0 and "ONNX Runtime differs from the model by" in said, err
    session = runtime.InferenceSession(out)
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    assert (given.name, answer.name) == ("image", "logits")
    assert given.shape[0] == (batch or "batch")
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["image_size"]) == list(model.config.pixels)
    images = picture(model)[:1].expand(batch or 5, -1, -1, -1).contiguous()
    (found,) = session.run(None, {"image": images.numpy()})
    wanted = logits(model, images)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-3, atol=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


def test_a_wrong_graph_is_an_error_and_leaves_nothing(weights, tmp_path, monkeypatch):
    model = vitkern.load(weights)
    real = torch.export.load

    class Wrong:
        def __init__(self, program):
            self.run = program.module()

        def module(self):
            return lambda images: self.run(images) + 0.1

    monkeypatch.setattr(torch.export, "load", lambda place: Wrong(real(place)))
    with pytest.raises(ValueError, match=r"differs from the model by .* nothing was written"):
        exporting.to_torch(model, tmp_path / "out.pt2")
    assert not list(tmp_path.iterdir())
    assert model.path == "auto", "as it was"


def test_without_onnx_runtime_it_says_that_nothing_was_checked(capsys):
    answer = {"out": "x.onnx", "to": "onnx", "opset": 20, "bytes": 1, "difference": None}
    export._print(answer)
    assert "not checked: ONNX Runtime is not installed" in capsys.readouterr().out


def test_without_onnx_it_says_what_to_install(run, weights, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    status, _, err = run(weights, "-o", tmp_path / "out.onnx")
    assert status == 2 and "pip install 'vitkern[onnx]'" in err and err.count("\n") == 1


def test_variants_have_random_weights_and_say_so(run, tmp_path):
    out = tmp_path / "out.safetensors"
    words = ("--set", "depth=1", "--set", 'activation="gelu_tanh"', "--classes", 3)
    status, _, err = run("Ti/16", "-o", out, *words)
    assert status == 0 and "Ti/16 has random weights" in err
    config = vitkern.load(out).config
    assert (config.depth, config.activation, config.classes) == (1, "gelu_tanh", 3)


REFUSED = {
    "say what to write by --to": ["{weights}", "-o", "{tmp}/out"],
    "must end in .onnx": ["{weights}", "-o", "{tmp}/out.pt", "--to", "onnx"],
    "must end in .pt2": ["{weights}", "-o", "{tmp}/out.onnx", "--to", "torch"],
    "must end in .safetensors": ["{weights}", "-o", "{tmp}/out.npz", "--to", "torchvision"],
    "there is no folder": ["{weights}", "-o", "{tmp}/nowhere/out.onnx"],
    "exists: name another, or --force": ["{weights}", "-o", "{tmp}/there.onnx"],
    "there is no file or folder none.pt": ["none.pt", "-o", "{tmp}/out.onnx"],
    "no model of that name: unknown variant 'B/17'; did you mean B/16": [
        "B/17",
        "-o",
        "{tmp}/out.onnx",
    ],
    "'vit_base_patch16_225'; did you mean vit_base_patch16_224": [
        "vit_base_patch16_225",
        "-o",
        "{tmp}/out.onnx",
    ],
    "opset must be 18 to 23, not 3": ["{weights}", "-o", "{tmp}/out.onnx", "--opset", "3"],
    "for onnx and torch alone": ["{weights}", "-o", "{tmp}/a.safetensors", "--batch", "3"],
    "--batch 0: at least 1": ["{weights}", "-o", "{tmp}/out.onnx", "--batch", "0"],
    "expected FIELD=VALUE": ["{weights}", "-o", "{tmp}/out.onnx", "--set", "heads"],
    "--set depht: ViTConfig has no such field": [
        "{weights}",
        "-o",
        "{tmp}/out.onnx",
        "--set",
        "depht=3",
    ],
    "expected pixels, 384 or 384x256": ["{weights}", "-o", "{tmp}/a.onnx", "--image-size", "x"],
    "computes bf16 on a CPU": ["{weights}", "-o", "{tmp}/a.onnx", "--dtype", "bfloat16"],
    "cannot hold this model": ["{weights}", "-o", "{tmp}/x.safetensors", "--to", "open_clip"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_refuses(run, said, weights, tmp_path):
    (tmp_path / "there.onnx").write_bytes(b"somebody's")
    words = [word.format(weights=weights, tmp=tmp_path) for word in REFUSED[said]]
    status, out, err = run(*words)
    assert status == 2 and said in err and not out and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"]
    assert (tmp_path / "there.onnx").read_bytes() == b"somebody's"


def test_the_command_knows_every_layout_that_can_be_written():
    unwritable = {"dino", "mae"}
    assert set(export.LAYOUTS) == {"huggingface", *BY_NAME} - unwritable
