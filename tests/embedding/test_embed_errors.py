"""`vitkern embed` with what it cannot read or write: what it says, and what it leaves behind."""

import errno
import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

import vitkern
from tests.embedding.conftest import PIL
from vitkern import ViT, image_files
from vitkern.embedding import Encoder, Vectors, embed, parts


def bomb(png: bytes) -> bytes:
    """The header of an enormous image, on a file of a few bytes."""
    content = bytearray(png)
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    return bytes(content)


def test_broken_images_are_left_out_and_listed(run, weights, photos, tmp_path):
    good = (photos / "000.png").read_bytes()
    odd = {
        "empty.png": (b"", "not an image that Pillow can read"),
        "huge.png": (bomb(good), "too many"),
        "text.jpg": (b"hello", "not an image that Pillow can read"),
        "truncated.png": (good[: len(good) // 2], "broken image ("),
    }
    for name, (content, _) in odd.items():
        (photos / name).write_bytes(content)
    (photos / "gone.png").symlink_to(tmp_path / "nowhere.png")
    out = tmp_path / "v.npy"
    words = ("embed", photos / "*", "-o", out, "--weights", weights, "--batch", 4)
    status, said, err = run(*words)
    assert status == 1 and "11 vectors of 64" in said and "4 images left out:" in err
    listed = json.loads((tmp_path / "v.npy.skipped.json").read_text())
    assert {one["image"]: one["reason"] for one in listed}.keys() == {
        str(photos / name) for name in odd
    }
    for one in listed:
        name = one["image"].rpartition("/")[2]
        assert odd[name][1] in one["reason"] and one["image"] not in one["reason"]
        assert f"  {one['image']}: {one['reason']}\n" in err
    assert len(Vectors.open(out)) == 11
    report = tmp_path / "list.json"
    status, _, _ = run(*words, "--restart", "--report", report)
    assert status == 1 and len(json.loads(report.read_text())) == 4


def test_strict_stops_at_the_first(run, weights, photos, tmp_path):
    (photos / "003.png").write_bytes(b"hello")
    words = ("embed", photos, "-o", tmp_path / "v.npy", "--weights", weights)
    status, _, err = run(*words, "--strict")
    assert status == 2 and f"{photos / '003.png'}: not an image" in err
    assert not (tmp_path / "v.npy").exists()
    (photos / "003.png").write_bytes((photos / "004.png").read_bytes())
    assert run(*words, "--strict")[0] == 0


def test_strict_also_of_what_an_earlier_run_left_out(weights, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_IMAGES", 4)
    (photos / "001.png").write_bytes(b"hello")
    encoder = Encoder.open(weights)

    def stop(report):
        if report.done == 8:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        embed([photos], tmp_path / "v.npy", encoder, batch=4, progress=stop)
    with pytest.raises(ValueError, match=r"001\.png: not an image"):
        embed([photos], tmp_path / "v.npy", encoder, batch=4, strict=True)


def test_nothing_readable_is_an_error(run, weights, photos, tmp_path):
    for path in photos.iterdir():
        path.write_bytes(b"hello")
    status, _, err = run("embed", photos, "-o", tmp_path / "v.npy", "--weights", weights)
    assert status == 2 and "none of the 11 images could be read" in err and err.count("\n") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos", "v.npy.skipped.json"]


def test_unreadable_files_are_left_out(weights, photos, tmp_path, monkeypatch):
    """The system refuses it; root, who may read everything, is made to believe so."""
    (photos / "002.png").chmod(0)
    if os.geteuid() == 0:
        real = PIL.open

        def refuse(file, *given, **more):
            if str(file).endswith("002.png"):
                raise PermissionError(13, "Permission denied", str(file))
            return real(file, *given, **more)

        monkeypatch.setattr(PIL, "open", refuse)
    report = embed([photos], tmp_path / "v.npy", Encoder.open(weights))
    (one,) = report.skipped
    assert one["image"].endswith("002.png") and "Permission denied" in one["reason"]


NAMES = ["two\nlines.png", "tab\t.png", "naïve 猫.png", "-o.png", "a'b\"c.png", "\x1b[31mred.png"]


def test_odd_names_come_back_as_they_are(run, weights, photos, tmp_path):
    content = (photos / "000.png").read_bytes()
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(content)
    (folder / "bad\x1b]0;x\n.png").write_bytes(b"hello")
    for kind in ("npy", "safetensors", "parquet"):
        if kind == "parquet":
            pytest.importorskip("pyarrow")
        out = tmp_path / f"v.{kind}"
        status, said, err = run("embed", folder, "-o", out, "--weights", weights)
        assert status == 1 and "\x1b" not in said + err, "no terminal obeys a file's name"
        assert "bad\\x1b]0;x\\n.png: not an image" in err
        found = Vectors.open(out)
        assert found.names == [str(folder / name) for name in sorted(NAMES)]
        assert all(found.place(name).is_file() for name in found.names)


def test_names_that_are_not_utf8_are_left_out(weights, photos, tmp_path):
    odd = os.fsencode(photos) + b"/caf\xe9.png"
    try:
        with open(odd, "wb") as file:
            file.write((photos / "000.png").read_bytes())
    except OSError:
        pytest.skip("this file system refuses such names")
    report = embed([photos], tmp_path / "v.npy", Encoder.open(weights))
    assert report.embedded == 11
    assert [one["reason"] for one in report.skipped] == ["its name is not UTF-8: rename it"]
    json.loads((tmp_path / "v.npy.skipped.json").read_text())


# ---- what is refused before any work ----


REFUSED = {
    "no such file or folder": ["{photos}/none.png"],
    "a folder without images": ["{empty}"],
    "no file matches": ["{photos}/*.bmp"],
    "standard input: embed reads files": ["-"],
    "http://localhost/x.png: embed reads files": ["http://localhost/x.png"],
    "must end in .parquet, .npy, .safetensors": ["{photos}", "-o", "{tmp}/v.csv"],
    "a folder, expected the name of a file": ["{photos}", "-o", "{folder}"],
    "there is no folder": ["{photos}", "-o", "{tmp}/nowhere/v.npy"],
    "at least one image": ["{photos}", "--batch", "0"],
    "at least one thread": ["{photos}", "--workers", "0"],
    "there is no file or folder none.safetensors": ["{photos}", "--weights", "none.safetensors"],
    "--model names the architecture": ["{photos}", "--weights", "", "--model", "B/16"],
    "its width is 64, not 1024": ["{photos}", "--model", "L/16"],
    "nowhere/list.json: there is no folder": ["{photos}", "--report", "{tmp}/nowhere/list.json"],
    "device cuda:77": ["{photos}", "--device", "cuda:77"],
    "is no folder of an interrupted": ["{photos}", "-o", "{tmp}/odd.npy"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_refuses(run, said, weights, photos, tmp_path):
    places = {"photos": photos, "empty": tmp_path / "empty", "tmp": tmp_path}
    places["folder"] = tmp_path / "folder.npy"
    places["empty"].mkdir()
    places["folder"].mkdir()
    (tmp_path / "odd.npy.parts").write_text("a file")
    words = [word.format(**places) for word in REFUSED[said]]
    if "-o" not in words:
        words += ["-o", tmp_path / "v.npy"]
    if "--weights" not in words:
        words += ["--weights", weights]
    elif "" in words:
        del words[words.index("--weights") : words.index("--weights") + 2]
    status, out, err = run("embed", *words)
    assert status == 2 and said in err and not out and err.count("\n") == 1
    assert not (tmp_path / "v.npy").exists() and not (tmp_path / "v.npy.parts").exists()


def test_a_class_token_must_be_there(run, photos, tmp_path):
    model = ViT("Ti/16", image_size=16, depth=1, class_token=False, pool="mean", classes=2)
    vitkern.save(model, tmp_path / "w.safetensors")
    words = ("embed", photos, "-o", tmp_path / "v.npy", "--weights", tmp_path / "w.safetensors")
    status, _, err = run(*words, "--tokens", "cls")
    assert status == 2 and "this model has no class token: take mean or all" in err
    assert run(*words)[0] == 0


def test_bad_weights_are_named(weights, photos, tmp_path):
    encoder = Encoder.open(weights)
    with torch.no_grad():
        encoder.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"tiny\.safetensors: the model answers NaN or Inf"):
        embed([photos], tmp_path / "v.npy", encoder)


def test_without_pyarrow_parquet_is_refused_at_once(run, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, _, err = run("embed", photos, "-o", tmp_path / "v.parquet")
    assert status == 2 and "pip install 'vitkern[embed]', or name the file .npy" in err


def test_unwritable_folders_are_refused(run, photos, tmp_path, monkeypatch):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    status, _, err = run("embed", photos, "-o", folder / "v.npy")
    assert status == 2 and f"the folder {folder} cannot be written to" in err


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from vitkern.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    run, weights, photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "MOST_IMAGES", 4)
    real, calls = np.savez, []

    def full(file, **arrays):
        calls.append(file)
        if len(calls) == 2:
            file.write(b"a part of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, **arrays)

    monkeypatch.setattr(np, "savez", full)
    words = ("embed", photos, "-o", tmp_path / "v.npy", "--weights", weights, "--batch", 4)
    status, _, err = run(*words)
    assert status == 2 and err.count("\n") == 1
    assert "v.npy cannot be written (No space left on device): mend that and run the same" in err
    assert not (tmp_path / "v.npy").exists()
    status, said, _ = run(*words)
    assert status == 0 and "(4 were done before)" in said


@pytest.mark.full
def test_a_limit_of_the_system_is_one_line_too(done, weights, photos, tmp_path):
    """Of a file's size: the same errors from the same calls as a full disk's."""
    words = ("embed", str(photos), "-o", str(tmp_path / "v.npy"), "--weights", str(weights))
    command = [sys.executable, "-c", FULL, *words, "--tokens", "all"]
    full = subprocess.run(command, capture_output=True, text=True)
    assert full.returncode == 2 and "v.npy cannot be written (File too large)" in full.stderr
    assert "run the same command again" in full.stderr and "Traceback" not in full.stderr
    assert not (tmp_path / "v.npy").exists()
    assert done(*words[1:], "--tokens", "all")["embedded"] == 11


def test_a_damaged_part_is_named(weights, photos, tmp_path, monkeypatch):
    encoder, out = Encoder.open(weights), tmp_path / "v.npy"
    real = parts.Folder.save

    def damage(self, part, result):
        real(self, part, result)
        (path,) = self.path.glob("*.npz")
        path.write_bytes(path.read_bytes()[:100])

    monkeypatch.setattr(parts.Folder, "save", damage)
    with pytest.raises(ValueError, match="is damaged: remove it, and run again"):
        embed([photos], out, encoder)


def test_warnings_of_the_caller_are_as_before(weights, photos, tmp_path):
    import warnings

    before = list(warnings.filters)
    embed([photos], tmp_path / "v.npy", Encoder.open(weights), workers=4, batch=1)
    assert warnings.filters == before


def test_the_crop_is_that_of_predict(photos):
    image = image_files.read(photos / "000.png")
    encoder = Encoder.open()
    pixels = torch.from_numpy(encoder.pixels(image).copy())
    a = image_files.normalised(pixels, encoder.normalisation)
    b = image_files.prepare(image, (32, 32), encoder.normalisation, encoder.crop)
    assert torch.equal(a, b)
