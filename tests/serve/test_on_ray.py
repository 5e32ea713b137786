"""`vitkern serve --where ray`: the local server's answers, bit for bit, from replicas."""

import http.client
import json
import signal
import sys

import pytest

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")

from tests.serve.process import Process, post
from tests.serve.small_service import picture
from vitkern.__main__ import main

PICTURES = [picture(i) for i in range(4)]
ASKED = ("/predict?top=3", "/predict?attention=true", "/embed?pool=mean", "/embed?normalise=true")


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--where", "ray", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "pip install 'vitkern[ray,serve]'" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, said",
    [
        (["--replicas", "2"], "--replicas 2: one process serves here; add --where ray"),
        (["--where", "ray", "--replicas", "0"], "--replicas 0: at least one must answer"),
        (["--where", "ray", "--max-batch", "0"], "--max-batch 0: a batch holds at least one image"),
        (["--where", "ray", "--weights", "gone.safetensors"], "gone.safetensors"),
    ],
)
def test_bad_options_are_one_line(words, said, capsys):
    if "ray" in words:
        pytest.importorskip("ray.serve", exc_type=ImportError)
    assert main(["serve", "--port", "0", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def answers(address) -> list[tuple[int, bytes]]:
    """To every question, and to some that are refused."""
    found = []
    connection = http.client.HTTPConnection(*address, timeout=300)
    for content in (*PICTURES, b"", b"no picture"):
        found += [post(connection, content, asked)[:2] for asked in ASKED]
    return found


@pytest.mark.full
def test_replicas_answer_as_the_local_server_does_and_stop(tmp_path):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    with Process("--threads", 1) as local:
        wanted = answers(local.address)
    with Process(
        "--threads", 1, "--where", "ray", "--replicas", 2, "--max-bytes", 50000
    ) as running:
        assert "1 threads, batches of up to 8, 2 on Ray" in running.greeting
        assert answers(running.address) == answers(running.address) == wanted
        connection = http.client.HTTPConnection(*running.address, timeout=300)
        status, body, _ = post(connection, b"x" * 50001)
        assert status == 413 and json.loads(body)["error"] == "too_many_bytes"
        connection.request("GET", "/about")
        assert json.loads(connection.getresponse().read())["max_bytes"] == 50000
        status, said = running.stop(signal.SIGTERM)
        assert status == 0 and said.endswith("vitkern serve: stopped\n"), said


@pytest.mark.full
def test_more_replicas_than_the_cluster_has_cpus_are_refused(capsys):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    words = ["serve", "--port", "0", "--where", "ray", "--replicas", "500", "--threads", "9"]
    assert main(words) == 2
    assert "500 replicas of 9 threads need 4500 CPUs" in capsys.readouterr().err
