"""`vitkern predict`: where images come from, the package's own model, the contact sheet."""

import functools
import http.server
import io
import json
import sys
import threading
import types

import pytest
import torch

from vitkern import ViT, contact_sheet, image_sources, trained_file
from vitkern.__main__ import main
from vitkern.cli import predict
from vitkern.weights.layouts.base import OWN_ENTRY

PIL = pytest.importorskip("PIL.Image", reason="predict reads images with Pillow")
safetensors = pytest.importorskip("safetensors.torch")
NAMES = ["left", "right", "up"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model file of vitkern's own, with a stem, names and pixel statistics; in half precision."""
    torch.manual_seed(0)
    model = ViT(
        "Ti/16", image_size=16, patch_size=2, stem="conv", width=32, heads=2, mlp_width=32, depth=1,
        classes=3, mean=(0.5,) * 3, std=(0.25,) * 3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("weights") / "own.safetensors"
    about = trained_file.metadata(model.config, NAMES, 1.0)
    safetensors.save_file({n: t.half() for n, t in model.state_dict().items()}, path, about)
    return path


def run(capsys, *words):
    status = main(["predict", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def answers(capsys, *words):
    status, out, _ = run(capsys, *words, "--json")
    assert status == 0
    return json.loads(out)


def test_a_model_of_its_own_needs_no_more_words(capsys, weights, photo):
    (answer,) = answers(capsys, photo, "--weights", weights)
    assert {top["label"] for top in answer["top"]} == set(NAMES)
    model = trained_file.read(weights).model
    assert model.dtype is torch.float32 and not model.training
    pixels = torch.tensor(list(PIL.open(photo).convert("RGB").resize((24, 16), 3).tobytes()))
    pixels = pixels.view(16, 24, 3)[:, 4:20].permute(2, 0, 1)[None].to(torch.uint8)
    with torch.inference_mode():
        wanted = model(pixels).softmax(-1)[0]
    for top in answer["top"]:
        assert top["probability"] == pytest.approx(wanted[top["index"]].item(), abs=1e-5)


def test_folders_patterns_and_files_are_one_list(capsys, weights, photo, tmp_path):
    folder = tmp_path / "many" / "deep"
    folder.mkdir(parents=True)
    for name in ("b.png", "a.PNG"):
        (folder / name).write_bytes(photo.read_bytes())
    (folder / "notes.txt").write_text("no image")
    found = answers(capsys, tmp_path / "many", folder / "*.png", photo, "--weights", weights)
    names = [folder / "a.PNG", folder / "b.png", folder / "b.png", photo]
    assert [answer["image"] for answer in found] == list(map(str, names))
    assert len({json.dumps(answer["top"]) for answer in found}) == 1, "the same picture"


def test_a_file_whose_name_looks_like_a_pattern(capsys, weights, photo, tmp_path):
    odd = tmp_path / "cat[1]*.png"
    odd.write_bytes(photo.read_bytes())
    assert answers(capsys, odd, "--weights", weights)[0]["image"] == str(odd)


def test_standard_input(capsys, weights, photo, monkeypatch):
    content = io.BytesIO(photo.read_bytes())
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=content))
    (piped,) = answers(capsys, "-", "--weights", weights)
    assert piped["top"] == answers(capsys, photo, "--weights", weights)[0]["top"]


@pytest.fixture
def server(tmp_path):
    """Serves tmp_path on the loopback."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_addresses(capsys, weights, photo, server, monkeypatch):
    (answer,) = answers(capsys, f"{server}/photo.png", "--weights", weights)
    assert answer["top"] == answers(capsys, photo, "--weights", weights)[0]["top"]
    status, _, err = run(capsys, f"{server}/none.png", photo, "--weights", weights)
    assert status == 1 and "none.png: cannot be fetched (" in err
    monkeypatch.setattr(image_sources, "LARGEST_DOWNLOAD", 1 << 10)
    status, _, err = run(capsys, f"{server}/photo.png", "--weights", weights)
    assert status == 1 and "photo.png: more than" in err


def test_an_address_that_nobody_serves(capsys, weights):
    status, _, err = run(capsys, "http://127.0.0.1:9/cat.jpg", "--weights", weights)
    assert status == 1 and "cannot be fetched" in err and err.count("\n") == 1


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_batch_changes_no_answer(capsys, weights, tmp_path, batch):
    for i in range(5):
        PIL.effect_noise((20 + i, 30), 60).convert("RGB").save(tmp_path / f"{i}.png")
    whole = answers(capsys, tmp_path, "--weights", weights)
    parts = answers(capsys, tmp_path, "--weights", weights, "--batch", batch)
    assert [a["image"] for a in parts] == [a["image"] for a in whole]
    for a, b in zip(parts, whole, strict=True):
        assert [t["index"] for t in a["top"]] == [t["index"] for t in b["top"]]


def test_the_sheet_shows_every_image(capsys, weights, tmp_path):
    colours = ((250, 10, 10), (10, 250, 10), (10, 10, 250))
    for i, colour in enumerate(colours):
        PIL.new("RGB", (40, 40), colour).save(tmp_path / f"{i}.png")
    sheet = tmp_path / "sheet.webp"
    (tmp_path / "9.png").write_text("broken")
    status, _, err = run(capsys, tmp_path, "--weights", weights, "--save", sheet)
    assert status == 1 and f"wrote {sheet}" in err
    with PIL.open(sheet) as image:
        pixels, side = image.convert("RGB"), contact_sheet.THUMBNAIL + contact_sheet.MARGIN
        middle = contact_sheet.MARGIN + contact_sheet.THUMBNAIL // 2
        rows = side + contact_sheet.LINE * (1 + len(NAMES))
        for i, colour in enumerate(colours):
            seen = pixels.getpixel((middle + i % 2 * side, middle + i // 2 * rows))
            assert all(abs(a - b) < 12 for a, b in zip(seen, colour, strict=True))


def test_long_and_odd_names_fit_the_sheet(tmp_path):
    words = ["x" * 500, "a\nb\x00c", "", "汉字" * 40]
    picture = PIL.new("RGB", (8, 8))
    cells = [contact_sheet.Cell(picture, [contact_sheet.Caption(word, 2.0)]) for word in words]
    contact_sheet.draw(cells, tmp_path / "sheet.png")
    assert PIL.open(tmp_path / "sheet.png").width < 3 * contact_sheet.THUMBNAIL


REFUSED = {
    "no file matches": ["nowhere/*.jpg"],
    "a folder without images": ["{empty}"],
    "at least one image": ["{photo}", "--batch", "0"],
    "must end in": ["{photo}", "--save", "sheet.txt"],
    "there is no folder": ["{photo}", "--save", "nowhere/sheet.png"],
    "holds one image": ["-", "-"],
    "not a model that vitkern train wrote": ["{photo}", "--weights", "{other}"],
    "other classes than the model's 3": ["{photo}", "--classes", "{names}"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_refuses(capsys, said, weights, photo, tmp_path):
    places = {"photo": photo, "empty": tmp_path / "empty", "names": tmp_path / "names.json"}
    places["empty"].mkdir()
    places["names"].write_text('["one"]')
    places["other"] = tmp_path / "other.safetensors"
    tensors = {"head.weight": torch.zeros(3, 4)}
    safetensors.save_file(tensors, places["other"], {OWN_ENTRY: '{"classes": []}'})
    words = [word.format(**places) for word in REFUSED[said]]
    extra = [] if "--weights" in words else ["--weights", weights]
    status, out, err = run(capsys, *words, *extra)
    assert status == 2 and said in err and not out


def test_grey_models_are_refused(capsys, photo, tmp_path):
    model = ViT("Ti/16", image_size=16, channels=1, depth=1, classes=3)
    path = tmp_path / "grey.safetensors"
    safetensors.save_file(model.state_dict(), path, trained_file.metadata(model.config, NAMES, 1.0))
    status, _, err = run(capsys, photo, "--weights", path)
    assert status == 2 and "1 channels; photographs have 3" in err


def test_names_and_classes_must_agree(tmp_path):
    model = ViT("Ti/16", image_size=16, depth=1, classes=3)
    path = tmp_path / "odd.safetensors"
    about = trained_file.metadata(model.config, NAMES[:2], 1.0)
    safetensors.save_file(model.state_dict(), path, about)
    with pytest.raises(ValueError, match="2 names for the model's 3 classes"):
        trained_file.read(path)


def test_classify_is_the_same_command():
    assert predict.ALIASES == ("classify",)


# ---- the model that the package brings ----


def test_the_own_model_answers_without_weights(capsys, photo):
    (answer,) = answers(capsys, photo, "--top", 10)
    names = [top["label"] for top in answer["top"]]
    assert sorted(names) == sorted(trained_file.shipped().classes) and "cat" in names
    assert sum(top["probability"] for top in answer["top"]) == pytest.approx(1, abs=1e-4)


def test_the_own_model_is_small():
    parameters = sum(p.numel() for p in trained_file.shipped().model.parameters())
    assert trained_file.SHIPPED.stat().st_size < 3e6 and parameters < 1.5e6


def test_the_own_model_knows_a_cat(capsys, shared_data):
    (answer,) = answers(capsys, shared_data / "images" / "free" / "chelsea.png")
    assert answer["top"][0]["label"] == "cat"


def test_an_installation_without_the_model_says_so(capsys, photo, monkeypatch, tmp_path):
    monkeypatch.setattr(trained_file, "SHIPPED", tmp_path / "none.safetensors")
    status, _, err = run(capsys, photo)
    assert status == 2 and "this installation lacks none.safetensors" in err
    status, _, err = run(capsys, photo, "--model", "B/16")
    assert status == 2 and "names the architecture of --weights" in err


# ---- files that vitkern itself wrote ----


def test_saved_models_bring_their_own_normalisation(capsys, photo, tmp_path):
    import vitkern

    sizes = {"image_size": 32, "depth": 2, "classes": 3}
    model = ViT("Ti/16", mean=(0.5,) * 3, std=(0.5,) * 3, **sizes).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)  # no probability is 0 or 1
    vitkern.save(model, tmp_path / "a.safetensors")
    vitkern.save(model, tmp_path / "hf", "huggingface")
    vitkern.save_packed(model, tmp_path / "packed.safetensors", "int8")
    vitkern.save_packed(model, tmp_path / "panels.safetensors", "bf16")
    for name in ("a.safetensors", "hf", "packed.safetensors", "panels.safetensors"):
        given = ("--weights", tmp_path / name)
        own = answers(capsys, photo, *given)
        assert own == answers(capsys, photo, *given, "--normalisation", "half"), name
        assert own != answers(capsys, photo, *given, "--normalisation", "imagenet"), name
    status, _, err = run(capsys, photo, *given, "--precision", "fp32")
    assert status == 2 and "is packed for bf16 and holds no weights for fp32" in err


def test_a_stem_is_saved_and_loaded(tmp_path, weights):
    import vitkern

    model = trained_file.read(weights).model
    vitkern.save(model, tmp_path / "stem.safetensors")
    again = vitkern.load(tmp_path / "stem.safetensors")
    assert again.config == model.config
    image = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        assert torch.equal(again.eval()(image), model(image))


def test_absurd_configurations_allocate_nothing(tmp_path):
    import json
    import resource

    config = {"width": 16384, "depth": 64, "heads": 16, "mlp_width": 1 << 18, "classes": 3}
    about = {"config": config, "classes": NAMES}
    path = tmp_path / "absurd.safetensors"
    safetensors.save_file({"x": torch.zeros(1)}, path, {OWN_ENTRY: json.dumps(about)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="its tensors are not its model's"):
        trained_file.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize("address", ["http://localhost:abc/x.jpg", "http://[::1/x.jpg"])
def test_bad_addresses_are_one_line(capsys, weights, photo, address):
    status, _, err = run(capsys, address, photo, "--weights", weights)
    assert status in (1, 2) and err.count("\n") == 1 and "Traceback" not in err
