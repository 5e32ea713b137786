"""A real server on the loopback: it stops without losing a request, and comes back after a kill."""

import http.client
import re
import signal
import socket

import pytest

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")

from tests.conftest import ROOT
from tests.project.test_docs import python_blocks
from tests.serve.process import HANG_UPS, RETRIED, Load, Process, post
from tests.serve.small_service import picture
from vitkern.__main__ import main
from vitkern.serve import server

PICTURES = [picture(i) for i in range(5)]


def test_a_stop_under_load_answers_what_was_accepted_and_refuses_the_rest():
    """The client's 200s are exactly the server's accepted requests: none is lost silently."""
    with Process("--max-batch", 4, "--stop-seconds", 500) as running:
        with Load(running.address, PICTURES) as load:
            load.until(50)
            status, said = running.stop(signal.SIGTERM)  # while new requests never cease
            load.until(1, "ConnectionRefusedError")
        found = re.search(r"stopped; (\d+) accepted, (\d+) answered, 0 left .*, 0 lost", said)
        assert status == 0 and found, said
        assert int(found[1]) == int(found[2]) == load.counts[200]
    assert load.counts[503] > 0, f"nobody was told of the stop: {load.counts}"
    assert not load.wrong, "an answer differs from another to the same picture"
    assert load.counts.keys() <= {200, 503} | HANG_UPS, load.counts


@pytest.mark.full
def test_the_guide_s_client_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(PICTURES[0])
    (block,) = python_blocks(ROOT / "docs" / "serve.md")
    with Process() as running:
        exec(compile(block.replace("127.0.0.1:8000", "{}:{}".format(*running.address)), "", "exec"))
    assert capsys.readouterr().out.strip() == "128", "the own model's width"


@pytest.mark.full
def test_a_stop_from_the_keyboard_is_the_same_and_a_taken_port_is_said(capsys):
    with Process() as running:
        connection = http.client.HTTPConnection(*running.address, timeout=300)
        assert post(connection, PICTURES[0])[0] == 200
        host, port = running.address
        assert main(["serve", "--port", str(port)]) == 2
        assert f"{host}:{port}: Address already in use: choose another" in capsys.readouterr().err
        status, said = running.stop(signal.SIGINT)
        assert status == 0 and "1 accepted, 1 answered" in said


@pytest.mark.full
def test_a_client_that_tries_again_survives_a_kill():
    with Process() as running:
        with Load(running.address, PICTURES) as load:
            load.until(20)
            status, _ = running.stop(signal.SIGKILL)
            assert status == -signal.SIGKILL
            load.until(5, "ConnectionRefusedError")
            with Process(port=running.address[1]) as again:
                assert again.address == running.address
                load.until(100)
                load.end.set()
                status, said = again.stop()
                assert status == 0 and "0 lost" in said, said
    assert not load.wrong, "an answer differs from one before the kill"


@pytest.mark.full
def test_clients_that_hang_up_leave_nothing_behind():
    """Half of them close the connection at once; the others are answered as ever."""
    with Process("--queue", 8) as running:
        with Load(running.address, PICTURES, threads=3) as load:
            for i in range(60):
                body = PICTURES[i % 5]
                head = (
                    f"POST /predict HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                with socket.create_connection(running.address) as raw:
                    raw.sendall(head.encode() + body[: -(i % 2) or None])
            load.until(20)
        connection = http.client.HTTPConnection(*running.address, timeout=300)
        connection.request("GET", "/metrics")
        said = connection.getresponse().read().decode()
        assert "vitkern_queue_depth 0.0" in said
        status, said = running.stop()
        assert status == 0 and ", 0 lost" in said, said


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max-batch", "0"], "--max-batch 0: a batch holds at least one"),
        (["--max-wait-ms", "-1"], "--max-wait-ms -1"),
        (["--queue", "0"], "--queue 0"),
        (["--max-bytes", "0"], "--max-bytes 0"),
        (["--max-pixels", "200000000"], "--max-pixels 200000000: expected 1 to 100000000"),
        (["--threads", "0"], "--threads 0"),
        (["--decoders", "0"], "--decoders 0"),
        (["--stop-seconds", "0"], "--stop-seconds 0"),
        (["--port", "70000"], "--port 70000: expected 0 to 65535"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1: no such address"),
        (["--weights", "none.safetensors"], "none.safetensors"),
    ],
)
def test_options_that_cannot_work_are_errors_in_words(words, said, capsys):
    port = [] if "--port" in words else ["--port", "0"]
    assert main(["serve", *port, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_small_packets_are_not_held_back():
    """asyncio sets TCP_NODELAY where the listening socket names its protocol."""
    with server.listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP and server.is_loopback(server.address_of(bound))
        assert server.address_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_retried_errors_are_those_of_connections():
    assert issubclass(ConnectionRefusedError, RETRIED) and not issubclass(ValueError, RETRIED)


@pytest.mark.full
def test_the_load_tool_measures(capsys):
    from tools import serve_load

    serve_load.main(["--clients", "2", "--seconds", "0.5", "--batches", "8"])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "max-batch" and row.split()[:2] == ["8", "2"]
    rate, p50, p99 = map(float, row.split()[2:5])
    assert rate > 0 and 0 < p50 <= p99
