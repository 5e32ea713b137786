"""A service around a small model, and a client for it."""

import pytest

from tests.serve.small_service import with_class_token


@pytest.fixture
def start():
    """start(predictor, options) -> Service, stopped at the end."""
    from vitkern.serve.app import Service

    running: list[Service] = []

    def begin(predictor=None, options=None) -> Service:
        running.append(Service(predictor or with_class_token(), options))
        return running[-1]

    yield begin
    for service in running:
        assert service.stop(10)


@pytest.fixture(scope="module")
def service():
    from vitkern.serve.app import Service

    made = Service(with_class_token())
    yield made
    assert made.stop(10)


@pytest.fixture(scope="module")
def client(service):
    from starlette.testclient import TestClient

    return TestClient(service, raise_server_exceptions=False)
