"""`vitkern search`: the nearest images, by the model that made the vectors and no other."""

import io
import json
import shutil
import sys
import types

import numpy as np
import pytest
import torch

import vitkern
from tests.embedding.conftest import PIL, noise
from vitkern import contact_sheet
from vitkern.embedding import Encoder, Vectors, embed, nearest, vector_files

KINDS = ["npy", "safetensors", "parquet"]


@pytest.fixture(params=KINDS)
def vectors(request, weights, photos, tmp_path):
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    embed([photos], tmp_path / f"v.{request.param}", Encoder.open(weights))
    return tmp_path / f"v.{request.param}"


def answers(run, *words):
    status, out, err = run("search", *words, "--json")
    assert status == 0, err
    return json.loads(out)


def test_an_image_is_nearest_to_itself(run, vectors, photos):
    images = sorted(photos.iterdir())[:3]
    found = answers(run, vectors, *images, "--top", 4)
    assert [one["image"] for one in found] == list(map(str, images))
    for image, one in zip(images, found, strict=True):
        assert one["nearest"][0]["image"] == str(image) and len(one["nearest"]) == 4
        assert one["nearest"][0]["similarity"] == pytest.approx(1, abs=1e-4)
        scores = [near["similarity"] for near in one["nearest"]]
        assert scores == sorted(scores, reverse=True)
    status, out, _ = run("search", vectors, images[0])
    assert status == 0 and out.splitlines()[1] == f"   1.0000  {images[0]}"
    assert len(out.splitlines()) == 11


@pytest.fixture
def npy(weights, photos, tmp_path):
    embed([photos], tmp_path / "v.npy", Encoder.open(weights))
    return tmp_path / "v.npy"


def test_scores_are_cosines_in_pieces_as_in_one(npy, monkeypatch):
    vectors = Vectors.open(npy)
    queries = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    wanted = torch.cosine_similarity(
        torch.from_numpy(queries)[:, None], torch.from_numpy(vectors.array())[None], dim=-1
    )
    for rows in (4096, 3):
        monkeypatch.setattr(vector_files, "ROWS", rows)
        for row, found in zip(wanted, nearest(vectors, queries, 5), strict=True):
            best = row.topk(5)
            assert [n.image for n in found] == [vectors.names[i] for i in best.indices]
            assert [n.similarity for n in found] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_other_weights_are_refused(run, npy, weights, photos, tmp_path):
    other = vitkern.load(weights)
    with torch.no_grad():
        other.blocks[1].mlp.fc1.weight += 0.1
    vitkern.save(other, tmp_path / "other.safetensors")
    image = photos / "000.png"
    status, _, err = run("search", npy, image, "--weights", tmp_path / "other.safetensors")
    assert status == 2 and "did not make these vectors: the weights are others" in err
    moved = tmp_path / "moved.safetensors"
    shutil.copy(weights, moved)
    assert answers(run, npy, image, "--weights", moved)[0]["nearest"][0]["image"] == str(image)


def test_weights_that_are_gone_are_asked_for(run, weights, photos, tmp_path):
    path = tmp_path / "w.safetensors"
    shutil.copy(weights, path)
    embed([photos], tmp_path / "v.npy", Encoder.open(path))
    path.unlink()
    status, _, err = run("search", tmp_path / "v.npy", photos / "000.png")
    assert (
        status == 2 and "w.safetensors" in err and "name the weights' place with --weights" in err
    )


def test_the_query_is_embedded_as_the_vectors_were(run, weights, photos, tmp_path):
    """Every choice of the run is the query's, too: else no image would be itself."""
    encoder = Encoder.open(
        weights, tokens="mean", precision="bf16", normalisation="clip", image_size=32
    )
    embed([photos], tmp_path / "v.npy", encoder)
    (one,) = answers(run, tmp_path / "v.npy", photos / "004.png")
    assert one["nearest"][0]["similarity"] == pytest.approx(1, abs=1e-4)


def test_queries_come_from_standard_input(run, npy, photos, monkeypatch):
    content = io.BytesIO((photos / "002.png").read_bytes())
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=content))
    assert answers(run, npy, "-")[0]["nearest"][0]["image"] == str(photos / "002.png")


def test_the_sheet_shows_query_and_answers(run, weights, tmp_path):
    folder = tmp_path / "colours"
    folder.mkdir()
    colours = {"red": (250, 10, 10), "green": (10, 250, 10), "blue": (10, 10, 250)}
    for name, colour in colours.items():
        PIL.new("RGB", (40, 40), colour).save(folder / f"{name}.png")
    embed([folder], tmp_path / "v.npy", Encoder.open(weights))
    (folder / "blue.png").unlink()
    sheet = tmp_path / "sheet.png"
    words = ("search", tmp_path / "v.npy", folder / "red.png", folder / "green.png")
    status, _, err = run(*words, "--top", 3, "--save", sheet)
    assert status == 0 and f"wrote {sheet}" in err
    side = contact_sheet.THUMBNAIL + contact_sheet.MARGIN
    middle = contact_sheet.MARGIN + contact_sheet.THUMBNAIL // 2
    with PIL.open(sheet) as image:
        assert image.width == 4 * side + contact_sheet.MARGIN
        pixels = image.convert("RGB")
        rows = [0, side + 2 * contact_sheet.LINE]
        for y, name in zip(rows, ("red", "green"), strict=True):
            for x in (0, side):  # the query, and its nearest, itself
                assert pixels.getpixel((middle + x, middle + y)) == colours[name]
        seen = {pixels.getpixel((middle + i * side, middle)) for i in (2, 3)}
        assert seen == {colours["green"], (0xE5, 0xE7, 0xEB)}, "what is gone is grey"


def test_bad_queries_do_not_stop_the_others(run, npy, photos):
    (photos / "bad\n.png").write_bytes(b"hello")
    status, out, err = run("search", npy, photos / "bad\n.png", photos / "000.png", "--top", 1)
    assert status == 1 and "bad\\n.png: not an image" in err and out.count("\n") == 2


def spoiled(npy, tmp_path, weights, photos):
    """Files of vectors that are none, by what is said of them."""
    made = {"not an array": tmp_path / "a.npy", "not a file of vectors": tmp_path / "b.safetensors"}
    for path in made.values():
        path.write_bytes(b"hello")
    shutil.copy(npy.with_name("v.npy.json"), tmp_path / "a.npy.json")
    made |= {"names and recipe, c.npy.json, are missing": tmp_path / "c.npy"}
    shutil.copy(npy, tmp_path / "c.npy")
    made |= {"2 vectors, but 11 names": tmp_path / "d.npy"}
    np.save(tmp_path / "d.npy", np.zeros((2, 64), np.float32))
    shutil.copy(npy.with_name("v.npy.json"), tmp_path / "d.npy.json")
    made |= {"not written by vitkern embed": tmp_path / "e.npy"}
    np.save(tmp_path / "e.npy", np.zeros((1, 64), np.float32))
    (tmp_path / "e.npy.json").write_text('{"images": ["x"]}')
    made |= {"is not JSON": tmp_path / "f.npy", "not a recipe": tmp_path / "g.npy"}
    np.save(tmp_path / "f.npy", np.zeros((1, 64), np.float32))
    (tmp_path / "f.npy.json").write_text("{")
    np.save(tmp_path / "g.npy", np.zeros((1, 64), np.float32))
    (tmp_path / "g.npy.json").write_text(
        json.dumps({"images": ["x"], vector_files.ENTRY: {"recipe": {"weights": None}}})
    )
    embed([photos], tmp_path / "h.npy", Encoder.open(weights, tokens="all"))
    made |= {"a search needs one vector each": tmp_path / "h.npy"}
    made |= {"no such file": tmp_path / "none.npy", "not a file of vectors (": tmp_path / "x.csv"}
    if pytest.importorskip("pyarrow"):
        made |= {"not a file of vectors, or damaged": tmp_path / "i.parquet"}
        (tmp_path / "i.parquet").write_bytes(b"hello")
    return made


def test_files_that_hold_no_vectors_are_one_line(run, npy, tmp_path, weights, photos):
    for said, path in spoiled(npy, tmp_path, weights, photos).items():
        status, out, err = run("search", path, photos / "000.png")
        assert status == 2 and said in err and not out and err.count("\n") == 1, (path.name, err)


REFUSED = {
    "at least one answer": ["{image}", "--top", "0"],
    "the picture's name must end in": ["{image}", "--save", "x.txt"],
    "pictures, at most 400": ["{image}", "--save", "x.png", "--top", "500"],
    "no file matches": ["{photos}/*.bmp"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_refuses(run, said, npy, photos):
    words = [word.format(image=photos / "000.png", photos=photos) for word in REFUSED[said]]
    status, out, err = run("search", npy, *words)
    assert status == 2 and said in err and not out


def test_fewer_images_than_asked_for(run, weights, tmp_path):
    folder = noise(tmp_path / "two", 2)
    embed([folder], tmp_path / "v.npy", Encoder.open(weights))
    (one,) = answers(run, tmp_path / "v.npy", folder / "000.png", "--top", 50)
    assert len(one["nearest"]) == 2


def test_the_snippet_of_the_guide_runs(weights, tmp_path, monkeypatch, capsys):
    from tests.project.test_docs import ROOT, python_blocks

    monkeypatch.chdir(tmp_path)
    noise(tmp_path / "photos", 6)
    shutil.copy(weights, tmp_path / "deit_tiny.safetensors")
    shutil.copy(tmp_path / "photos" / "003.png", tmp_path / "cat.png")
    (block,) = python_blocks(ROOT / "docs" / "embed.md")
    exec(compile(block, "embed.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("6 ") and second.startswith("[Neighbour(image='photos/003.png'")
