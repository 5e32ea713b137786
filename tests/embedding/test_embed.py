"""`vitkern embed`: the vectors are the model's, in every format, whatever interrupts the run."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import vitkern
from tests.conftest import ROOT
from tests.embedding.conftest import noise
from vitkern import image_files, trained_file
from vitkern.embedding import Encoder, Vectors, embed, job, parts

FORMATS = ("npy", "safetensors", "parquet")


def needs(kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")


def rows_of(weights: pathlib.Path, photos: pathlib.Path) -> torch.Tensor:
    """All tokens (N, S, D) of the images of a folder, one by one, without vitkern.embedding."""
    model = vitkern.load(weights)
    pixels = (model.config.mean, model.config.std)
    with torch.inference_mode():
        return torch.cat(
            [
                model.forward_features(
                    image_files.prepare(image_files.read(path), (16, 16), pixels)[None]
                )
                for path in sorted(photos.iterdir())
            ]
        )


@pytest.mark.parametrize(
    "tokens, kind",
    [
        ("cls", "npy"),
        ("mean", "safetensors"),
        ("all", "parquet"),
        ("all", "safetensors"),
        (None, "parquet"),
    ],
)
def test_vectors_are_the_model_s(done, weights, photos, tmp_path, tokens, kind):
    needs(kind)
    out = tmp_path / f"vectors.{kind}"
    words = () if tokens is None else ("--tokens", tokens)
    report = done(photos, "-o", out, "--weights", weights, "--batch", 4, *words)
    rows = rows_of(weights, photos)
    wanted = {"cls": rows[:, 0], "mean": rows[:, 2:].mean(1), "all": rows}[tokens or "cls"]
    found = Vectors.open(out)
    assert found.names == [str(path) for path in sorted(photos.iterdir())]
    assert report["embedded"] == report["images"] == len(found) == 11
    assert tuple(report["shape"]) == found.shape == wanted.shape[1:]
    torch.testing.assert_close(torch.from_numpy(found.array()), wanted, rtol=1e-4, atol=1e-5)
    assert not out.with_name(out.name + parts.SUFFIX).exists()


def test_other_libraries_read_the_files(weights, photos, tmp_path):
    encoder = Encoder.open(weights)
    for kind in FORMATS:
        needs(kind)
        embed([photos], tmp_path / f"v.{kind}", encoder)
    plain = np.load(tmp_path / "v.npy")
    assert plain.shape == (11, 64) and plain.dtype == np.float32
    from safetensors.numpy import load_file

    assert np.array_equal(load_file(tmp_path / "v.safetensors")["vectors"], plain)
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "v.parquet")
    assert table.column_names == ["image", "vector"]
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), plain)


def test_normalised_vectors_have_length_one(done, weights, photos, tmp_path):
    out = tmp_path / "v.npy"
    done(photos, "-o", out, "--weights", weights, "--tokens", "all", "--normalise")
    lengths = np.linalg.norm(np.load(out), axis=-1)
    assert np.allclose(lengths, 1, atol=1e-5)


def test_batches_and_workers_change_no_vector(weights, photos, tmp_path):
    encoder = Encoder.open(weights)
    found = []
    for i, (batch, workers) in enumerate([(32, 1), (1, 3), (4, 2)]):
        embed([photos], tmp_path / f"{i}.npy", encoder, batch=batch, workers=workers)
        found.append(np.load(tmp_path / f"{i}.npy"))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_precision_is_obeyed_and_written_down(done, weights, photos, tmp_path, precision):
    done(photos, "-o", tmp_path / "a.npy", "--weights", weights)
    done(photos, "-o", tmp_path / "b.npy", "--weights", weights, "--precision", precision)
    a, b = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert 0 < np.abs(a - b).max() < 0.3
    assert Vectors.open(tmp_path / "b.npy").about["recipe"]["precision"] == precision


def test_the_own_model_pools_as_it_was_trained(done, photos, tmp_path):
    report = done(photos, "-o", tmp_path / "v.npy")
    about = Vectors.open(tmp_path / "v.npy").about["recipe"]
    assert report["shape"] == [128] and about["tokens"] == "mean" and about["weights"] is None
    own = trained_file.shipped()
    assert about["crop"] == own.eval_crop and about["mean"] == list(own.model.config.mean)


def test_a_head_is_not_needed_and_changes_nothing(weights, photos, tmp_path):
    bare = vitkern.load(weights, classes=0)
    vitkern.save(bare, tmp_path / "bare.safetensors")
    one, other = Encoder.open(weights), Encoder.open(tmp_path / "bare.safetensors")
    assert one.sha256 == other.sha256 and one.shape == other.shape


def test_packed_weights_stay_int8(weights, tmp_path):
    vitkern.save_packed(vitkern.load(weights), tmp_path / "packed.safetensors", "int8")
    encoder = Encoder.open(tmp_path / "packed.safetensors")
    assert encoder.model.precision == "int8" and encoder.recipe["precision"] == "int8"
    assert encoder(np.zeros((2, 16, 16, 3), np.uint8)).shape == (2, 64)


def test_real_weights_give_the_published_features(shared_data):
    """Class tokens of DeiT-Tiny, computed in float64."""
    golden = np.load(shared_data / "weights" / "deit_tiny_golden16.npz")
    encoder = Encoder.open(shared_data / "weights" / "deit_tiny_patch16_224.timm.safetensors")
    found = encoder(golden["images_u8"][:4])
    np.testing.assert_allclose(found, golden["cls_features"][:4], atol=1e-4)


def test_images_come_as_folders_patterns_and_files_each_once(done, weights, photos, tmp_path):
    words = (photos, photos / "00*.png", photos / "003.png")
    assert done(*words, "-o", tmp_path / "v.npy", "--weights", weights)["images"] == 11


def test_rates_are_reported(run, done, weights, photos, tmp_path):
    report = done(photos, "-o", tmp_path / "v.npy", "--weights", weights, "--workers", 2)
    for name in ("images_per_second", "decoded_per_second", "computed_per_second"):
        assert report[name] > 0
    assert 0 <= report["waiting_share"] <= 1 and report["workers"] == 2
    assert report["computing"] + report["waiting"] <= report["seconds"]
    _, out, err = run("embed", photos, "-o", tmp_path / "w.npy", "--weights", weights)
    assert "of the time lost waiting for decoding" in out and "11/11 images" in err


# ---- interruptions ----


DYING = """
import os, signal, sys
import numpy as np
from vitkern.__main__ import main
from vitkern.embedding import parts

def die(file, count=[0], savez=np.savez, **arrays):
    count[0] += 1
    if count[0] == 3:
        file.write(b"PK half of a file")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    savez(file, **arrays)

parts.MOST_IMAGES, np.savez = 4, die
sys.exit(main(sys.argv[1:]))
"""


def test_kill_9_loses_and_doubles_nothing(done, weights, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_IMAGES", 4)
    monkeypatch.chdir(ROOT)
    (photos / "005.png").write_bytes(b"broken")
    words = (photos, "--weights", weights, "--batch", 2)
    whole, out = tmp_path / "whole.safetensors", tmp_path / "v.safetensors"
    done(*words, "-o", whole, status=1)
    command = [sys.executable, "-c", DYING, "embed", *map(str, words), "-o", str(out)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists() and out.with_name(out.name + ".parts").is_dir()
    report = done(*words, "-o", out, status=1)
    assert report["resumed"] == 8 and report["done"] == 11
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(out.name + ".parts").exists()
    assert done(*words, "-o", out, status=1)["resumed"] == 11, "complete: nothing to do"


class Stop(Exception):
    """As good as a kill, in this process."""


def interrupted(photos, out, encoder, after, **given):
    def stop(report):
        if report.done >= after:
            raise Stop

    with pytest.raises(Stop):
        embed([photos], out, encoder, progress=stop, **given)


def test_an_end_while_joining_costs_no_vector(weights, photos, tmp_path, monkeypatch):
    out, encoder = tmp_path / "v.npy", Encoder.open(weights)

    def stop(path, *_):
        path.write_bytes(b"half of a file")
        raise Stop

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(job.vector_files, "write", stop)
        embed([photos], out, encoder)
    assert not out.exists()
    assert embed([photos], out, encoder).resumed == 11
    assert np.load(out).shape == (11, 64)


def test_changed_arguments_are_refused_until_restart(run, weights, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_IMAGES", 4)
    out = tmp_path / "v.npy"
    encoder = Encoder.open(weights)
    interrupted(photos, out, encoder, 6, batch=2)
    with pytest.raises(ValueError, match=r"precision was fp32, is bf16.*or --restart"):
        embed([photos], out, Encoder.open(weights, precision="bf16"), batch=2)
    with pytest.raises(ValueError, match="batch was 2, is 3"):
        embed([photos], out, encoder, batch=3)
    other = vitkern.load(weights)
    with torch.no_grad():
        other.blocks[0].attn.qkv.weight[0] += 1
    vitkern.save(other, tmp_path / "other.safetensors")
    words = ("embed", photos, "-o", out, "--weights", tmp_path / "other.safetensors")
    status, _, err = run(*words, "--batch", 2)
    assert status == 2 and "the weights are others (SHA-256" in err and err.count("\n") == 1
    status, _, err = run(*words, "--batch", 2, "--restart")
    assert status == 0, err
    assert Vectors.open(out).about["recipe"]["weights_sha256"] != encoder.sha256


def test_images_that_changed_meanwhile_are_computed_again(weights, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_IMAGES", 4)
    encoder = Encoder.open(weights)
    out = tmp_path / "v.npy"
    interrupted(photos, out, encoder, 9, batch=2)
    (photos / "001.png").write_bytes((photos / "010.png").read_bytes())
    os.utime(photos / "001.png", ns=(1, 1))
    report = embed([photos], out, encoder, batch=2)
    assert report.resumed == 4, "the second part; the first has a changed image"
    embed([photos], tmp_path / "w.npy", encoder, batch=2)
    assert np.array_equal(np.load(out), np.load(tmp_path / "w.npy"))
    assert np.array_equal(np.load(out)[1], np.load(out)[10])


def test_what_is_there_is_not_replaced(run, weights, photos, tmp_path):
    out = tmp_path / "v.npy"
    words = ("embed", photos, "-o", out, "--weights", weights)
    assert run(*words)[0] == 0
    before = out.stat().st_mtime_ns
    status, said, _ = run(*words)
    assert status == 0 and "complete already, with 11 vectors" in said
    noise(photos, 12)
    status, _, err = run(*words)
    assert status == 2 and "is not of these images and arguments" in err and "--restart" in err
    assert out.stat().st_mtime_ns == before
    assert run(*words, "--restart")[0] == 0 and len(Vectors.open(out)) == 12
    out.write_bytes(b"somebody's")
    status, _, err = run(*words)
    assert status == 2 and out.read_bytes() == b"somebody's"


def test_two_at_once_are_kept_apart(weights, photos, tmp_path):
    pytest.importorskip("fcntl")
    folder = parts.Folder(tmp_path / "v.npy")
    with folder.held(), pytest.raises(ValueError, match="another vitkern embed is at work"):
        embed([photos], tmp_path / "v.npy", Encoder.open(weights))


def test_an_interrupt_says_how_to_go_on(run, weights, photos, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "computed", interrupt)
    status, _, err = run("embed", photos, "-o", tmp_path / "v.npy", "--weights", weights)
    assert status == 130 and "the same command goes on from here" in err


def test_progress_in_json_lines(run, weights, photos, tmp_path, monkeypatch):
    from vitkern.cli import embed as command

    monkeypatch.setattr(command, "SECONDS_BETWEEN_LINES", 0)
    words = ("embed", photos, "-o", tmp_path / "v.npy", "--weights", weights, "--batch", 4)
    _, out, err = run(*words, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["progress"] * 3 + ["done"] and not err
    assert [line["done"] for line in lines] == [4, 8, 11, 11]
    assert lines[1]["images_per_second"] > 0 and lines[2]["seconds_left"] == 0
