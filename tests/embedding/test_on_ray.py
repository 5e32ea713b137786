"""`vitkern embed --where ray`: the file of a local run, and its parts."""

import sys

import pytest

from vitkern.embedding import Encoder, embed, parts


def test_without_ray_it_says_what_to_install(run, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, err = run("embed", photos, "-o", tmp_path / "v.npy", "--where", "ray")
    assert status == 2 and "pip install 'vitkern[ray]'" in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.full
def test_the_cluster_s_file_is_the_local_one(cluster, weights, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_IMAGES", 4)
    (photos / "003.png").write_bytes(b"hello")
    encoder = Encoder.open(weights, normalise=True)
    local = embed([photos], tmp_path / "local.safetensors", encoder, batch=2)
    out, seen = tmp_path / "ray.safetensors", []

    def stop(report):
        seen.append(report.done)
        if len(seen) == 2:
            raise RuntimeError("as a kill would")

    with pytest.raises(RuntimeError, match="as a kill would"):
        embed([photos], out, encoder, batch=2, workers=1, where="ray", progress=stop)
    report = embed([photos], out, encoder, batch=2, workers=1, where="ray")
    assert report.resumed in (3, 4), "the first part that came back"
    assert report.skipped == local.skipped and report.embedded == 10
    assert report.computing > 0 and report.decoding > 0
    assert out.read_bytes() == (tmp_path / "local.safetensors").read_bytes()


@pytest.mark.full
def test_what_fails_there_is_one_line(cluster, weights, photos, tmp_path):
    encoder = Encoder.open(weights)
    encoder.weights = str(tmp_path / "gone.safetensors")
    with pytest.raises(ValueError, match=r"on the Ray cluster: .*gone\.safetensors"):
        embed([photos], tmp_path / "v.npy", encoder, where="ray")
