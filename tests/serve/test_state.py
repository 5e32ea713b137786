"""Health, readiness, metrics, the description, and what a page from here may load."""

import re

import pytest

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")

from starlette.testclient import TestClient

from tests.serve.small_service import picture
from vitkern.serve.app import PAGE_FILES, Options
from vitkern.serve.batching import Settings


def test_health_and_readiness_follow_the_service(start):
    service = start()
    client = TestClient(service)
    states = [client.get(address) for address in ("/health", "/ready")]
    assert [(s.status_code, s.json()["status"]) for s in states] == [(200, "ok"), (200, "ready")]
    service.batcher.close()
    states = [client.get(address) for address in ("/health", "/ready")]
    assert [(s.status_code, s.json()["status"]) for s in states] == [(200, "ok"), (503, "stopping")]
    refused = client.post("/predict", content=picture())
    assert refused.status_code == 503 and refused.json()["error"] == "stopping"
    assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
    assert service.batcher.stop(10)
    assert client.get("/health").json() == {"status": "broken"}


def test_metrics_count_requests_batches_and_time(start):
    client = TestClient(start(options=Options(Settings(max_batch=3))))
    client.post("/predict", content=picture())
    client.post("/embed", content=picture())
    client.post("/embed", content=b"no picture")
    client.get("/no/such/address")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'vitkern_requests_total{endpoint="/predict",status="200"} 1.0',
        'vitkern_requests_total{endpoint="/embed",status="422"} 1.0',
        'vitkern_requests_total{endpoint="other",status="404"} 1.0',
        'vitkern_request_seconds_count{endpoint="/embed"} 2.0',
        "vitkern_batch_size_sum 2.0",
        "vitkern_batch_seconds_count 2.0",
        "vitkern_images_total 2.0",
        "vitkern_queue_depth 0.0",
    ):
        assert line in answer.text, line
    assert float(re.search(r"^vitkern_images_per_second (\S+)$", answer.text, re.M)[1]) > 0


def test_about_names_the_model_without_its_folder(client):
    said = client.get("/about").json()
    assert said["model"] == "tiny.safetensors" and said["pools"] == ["token", "mean"]
    assert (said["classes"], said["image_size"], said["attention"]) == (3, [32, 32], True)


def test_every_error_has_the_same_shape_and_is_described(client):
    described = client.get("/openapi.json").json()
    problem = {"$ref": "#/components/schemas/Problem"}
    for address in ("/predict", "/embed"):
        post = described["paths"][address]["post"]
        for status in ("400", "408", "413", "415", "422", "429", "500", "503"):
            content = post["responses"][status]["content"]
            assert content["application/json"]["schema"] == problem, (address, status)
        assert "Retry-After" in post["responses"]["429"]["headers"]
        assert {"image/png", "multipart/form-data"} <= post["requestBody"]["content"].keys()
    assert "HTTPValidationError" not in described["components"]["schemas"]
    wrong = client.get("/nowhere"), client.get("/predict"), client.post("/predict?top=x")
    assert [one.status_code for one in wrong] == [404, 405, 422]
    assert all(one.json().keys() == {"error", "message"} for one in wrong)
    assert wrong[1].headers["allow"] == "POST"


@pytest.mark.parametrize("address", PAGE_FILES)
def test_the_page_is_whole_and_loads_nothing_from_elsewhere(client, address):
    answer = client.get(address)
    assert (
        answer.status_code == 200
        and "default-src 'none'" in (answer.headers["content-security-policy"])
    )
    assert not re.search(r"(?:https?:)?//(?!www\.w3\.org)[a-z]", answer.text), (
        "an address of others"
    )


def test_there_is_no_way_into_the_file_system(client):
    for path in (
        "/page.py",
        "/..%2fapp.py",
        "/page/page.html",
        "/%2e%2e/app.py",
        "/page.css/../app",
    ):
        assert client.get(path).status_code == 404
