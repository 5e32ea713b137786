"""The server behaves as /openapi.json says: schemathesis asks it odd and ordinary questions."""

import pytest

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")
pytest.importorskip("schemathesis", reason="the fuzzer of OpenAPI descriptions")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.serve.small_service import picture, with_class_token

pytestmark = pytest.mark.full
CASES = 150  # of each address

# A body that fits the schema is any bytes; one that is to be accepted must be a picture.
PICTURES = st.sampled_from(
    [picture(i, kind=kind) for i, kind in enumerate(("PNG", "JPEG", "WEBP"))]
)
for kind in ("image/png", "image/jpeg", "image/webp", "application/octet-stream"):
    schemathesis.openapi.media_type(kind, PICTURES)


@pytest.fixture(scope="module")
def described():
    from vitkern.serve.app import Service

    service = Service(with_class_token())
    yield schemathesis.openapi.from_asgi("/openapi.json", service)
    assert service.stop(30)


ADDRESSES = [
    ("POST", "/predict"),
    ("POST", "/embed"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/about"),
    ("GET", "/metrics"),
]


def test_every_address_is_asked(described):
    found = {(one.ok().method.upper(), one.ok().path) for one in described.get_all_operations()}
    assert found == set(ADDRESSES)


# What takes no parameters can be asked nothing wrong.
ASKED = [(*one, "positive") for one in ADDRESSES]
ASKED += [(*one, "negative") for one in ADDRESSES if one[0] == "POST"]


@pytest.mark.parametrize("method, address, mode", ASKED)
def test_the_server_is_what_it_says(described, method, address, mode):
    """Every answer has a status and a schema that are described; none is a 500."""
    asked = 0

    @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(described[address][method].as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case):
        nonlocal asked
        asked += 1
        case.call_and_validate()

    ask()
    print(f"{method} {address}, {mode}: {asked} cases")
    assert asked >= (CASES if method == "POST" else 1)
