"""The page in a real browser: a picture is dropped, and its answer is on the screen."""

import contextlib
import threading

import pytest

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")
pytest.importorskip("websocket", reason="websocket-client drives the browser")

import uvicorn

from tests.serve import chromium
from tests.serve.small_service import own_model, picture, with_class_token
from vitkern.serve import server
from vitkern.serve.app import Service

BARS = "[...document.querySelectorAll('#classes li')]"


@contextlib.contextmanager
def served(predictor):
    """The address of a model on the loopback, in a thread."""
    service = Service(predictor)
    with contextlib.closing(server.listen("127.0.0.1", 0)) as bound:
        running = uvicorn.Server(uvicorn.Config(service, log_level="warning"))
        thread = threading.Thread(target=running.run, args=([bound],))
        thread.start()
        yield server.address_of(bound)
        running.should_exit = True
        thread.join(60)
    assert service.stop(10)


@pytest.fixture(scope="module")
def address():
    """The package's own model."""
    with served(own_model()) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(chromium.NAMES)} is installed")
    opened = chromium.Browser(program, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


def test_a_dropped_picture_is_answered(browser, address, tmp_path):
    path = tmp_path / "noise.png"
    path.write_bytes(picture(3, (120, 80)))
    browser.open(address)
    browser.until("document.getElementById('about').textContent.includes('cifar10')")
    browser.drop(path, 300, 300)
    browser.until(f"{BARS}.length === 5")
    shares = browser.run(
        f"{BARS}.map((bar) => parseFloat(bar.querySelector('.share').textContent))"
    )
    assert shares == sorted(shares, reverse=True) and 50 < sum(shares) <= 101
    best = browser.run(f"{BARS}[0].children[1].textContent")
    assert browser.run("document.getElementById('status').textContent").startswith(best)
    assert browser.run("document.getElementById('picture').getAttribute('aria-label')") == (
        f"the picture: {best}; bright where the model looks"
    )
    # The attention is drawn: the spotlight is darker than the picture alone, the heat map another.
    seen = {view: brightness(browser, view) for view in ("light", "heat", "plain")}
    assert seen["light"] < 0.8 * seen["plain"] and len(set(seen.values())) == 3
    assert all(one.startswith((address, "blob:", "data:")) for one in browser.requested[1:])
    assert not browser.said, "an error on the console"


def brightness(browser, view: str) -> float:
    return browser.run(f"""(() => {{
        document.getElementById("view-{view}").click();
        const canvas = document.getElementById("picture");
        const {{data}} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.reduce((a, b, i) => i % 4 === 3 ? a : a + b, 0) / data.length;
    }})()""")


def test_a_model_without_a_classifier_shows_its_vector(browser, tmp_path):
    path = tmp_path / "noise.png"
    path.write_bytes(picture(3))
    with served(with_class_token(classes=0)) as address:
        browser.open(address)
        browser.until("document.getElementById('about').textContent.includes('no classifier')")
        browser.drop(path, 300, 300)
        browser.until("document.getElementById('status').textContent.includes('192 numbers')")
        assert browser.run(f"{BARS}.length") == 0 and not browser.said


def test_what_is_no_picture_is_said_so(browser, address, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no picture")
    browser.open(address)
    browser.drop(path, 300, 300)
    browser.until("document.getElementById('status').classList.contains('bad')")
    assert "not an image" in browser.run("document.getElementById('status').textContent")
    assert browser.run(f"{BARS}.length") == 0


def test_the_page_can_be_used_by_keyboard_and_read_aloud(browser, address):
    browser.open(address)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in tree
        if not node["ignored"]
    }
    assert {("heading", "vitkern"), ("heading", "Answer"), ("link", "API")} <= named
    assert any(name == "Choose a picture" for _, name in named)
    assert any(role == "status" for role, _ in named)
    browser.run("document.getElementById('file').focus()")
    assert browser.run("document.activeElement.id") == "file", "the file chooser takes no focus"
