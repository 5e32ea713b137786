"""What the app answers: equal to the library's own, bit for bit in any company; errors in words."""

import asyncio
import io
import threading
import time

import pytest
import torch

pytest.importorskip("fastapi", reason="vitkern[serve] is not installed")

import httpx
from starlette.testclient import TestClient

from tests.serve.small_service import own_model, picture, with_class_token
from vitkern import image_files
from vitkern.inspection import rollout
from vitkern.serve.app import Options
from vitkern.serve.batching import Settings
from vitkern.serve.uploads import FORM_ROOM, Limits


def post(client, address="/predict", content=None, kind="image/png"):
    content = picture() if content is None else content
    return client.post(address, content=content, headers={"content-type": kind})


def pixels_of(predictor, content):
    return predictor.prepared(image_files.decode(content, "test"))[None]


# ---- answers ----


def test_predictions_are_the_model_s(client, service):
    found = post(client, "/predict?top=9").json()
    with torch.inference_mode():
        wanted = service.predictor.model(pixels_of(service.predictor, picture())).softmax(-1)[0]
    assert found["model"] == "tiny.safetensors" and found["attention"] is None
    assert [c["probability"] for c in found["top"]] == sorted(wanted.tolist(), reverse=True)
    for c in found["top"]:
        assert c["probability"] == wanted[c["index"]] and c["label"] in service.predictor.names
    assert len(post(client, "/predict?top=1").json()["top"]) == 1


def test_a_model_without_a_classifier_embeds_and_says_that_it_names_nothing(start):
    service = start(with_class_token(classes=0))
    client = TestClient(service, raise_server_exceptions=False)
    with torch.inference_mode():
        tokens = service.predictor.model.forward_features(pixels_of(service.predictor, picture()))
    assert post(client, "/embed").json()["embedding"] == tokens[0, 0].tolist()
    refused = post(client, "/predict")
    assert refused.status_code == 422 and refused.json()["error"] == "no_classifier"
    assert "/embed" in refused.json()["message"]
    assert client.get("/about").json()["classes"] == 0


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_embeddings_are_pooled_tokens(client, service, pool):
    model = service.predictor.model
    with torch.inference_mode():
        tokens = model.forward_features(pixels_of(service.predictor, picture()))
        wanted = tokens[0, 0] if pool == "token" else tokens[0, 1:].mean(0)
    found = post(client, f"/embed?pool={pool}").json()
    assert found["pool"] == pool and found["embedding"] == wanted.tolist()
    unit = torch.tensor(post(client, f"/embed?pool={pool}&normalise=true").json()["embedding"])
    assert (
        unit.norm().item() == pytest.approx(1) and torch.cosine_similarity(unit, wanted, 0) > 0.9999
    )


@pytest.mark.parametrize("changes", [{}, {"pool": "mean", "final_norm": "after_pool"}])
def test_the_default_embedding_is_what_the_head_sees(start, changes):
    service = start(with_class_token(**changes))
    model = service.predictor.model
    with torch.inference_mode():
        tokens = model.forward_features(pixels_of(service.predictor, picture()))
        wanted = model.forward_head(tokens, pre_logits=True)[0]
    found = post(TestClient(service), "/embed").json()
    assert found["pool"] == model.config.pool and found["embedding"] == wanted.tolist()


def test_attention_is_the_rollout_over_the_part_that_was_seen(client, service):
    found = post(client, "/predict?attention=true").json()["attention"]
    with torch.no_grad():
        wanted = rollout(service.predictor.model, pixels_of(service.predictor, picture()))[0]
    assert torch.allclose(torch.tensor(found["weights"]), wanted, atol=1e-6)
    # 60 x 40: of the short side 7/8 are kept, and as many pixels of the long one.
    assert found["part"] == pytest.approx([12.5 / 60, 0.0625, 47.5 / 60, 0.9375], abs=0.02)


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (1000, 8), (31, 31), (1, 1)])
def test_the_part_that_is_seen_is_where_the_crop_comes_from(size):
    """Of a ramp the crop's mean colour is that of the part's middle."""
    from PIL import Image

    ramp = Image.linear_gradient("L").rotate(90).resize(size).convert("RGB")
    left, top, right, bottom = image_files.seen_part(size, (32, 32), 0.875)
    crop = image_files.prepare(ramp, (32, 32), ((0.0,) * 3, (1.0,) * 3), 0.875)
    seen = ramp.crop(
        [round(v) for v in (left * size[0], top * size[1], right * size[0], bottom * size[1])]
    )
    if size != (1, 1):
        wanted = image_files.prepare(seen, (32, 32), ((0.0,) * 3, (1.0,) * 3), 1.0)
        assert crop.mean().item() == pytest.approx(wanted.mean().item(), abs=0.03)
    assert (left + right) / 2 == pytest.approx(0.5, abs=0.02) == (top + bottom) / 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_bodies_and_forms_say_the_same(client, kind):
    content = picture(kind=kind)
    raw = post(client, content=content, kind="").json()
    assert raw == post(client, content=content, kind="application/x-www-form-urlencoded").json()
    assert raw == post(client, content=content, kind="image/whatever").json()
    for name in ("image", "file"):
        form = client.post("/predict", files={name: ("../../etc/passwd", content)})
        assert form.status_code == 200 and form.json() == raw


def test_pictures_are_upright_before_they_are_judged(client):
    from PIL import Image

    image = image_files.decode(picture(), "test")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it right by a quarter
    turned, plain = io.BytesIO(), io.BytesIO()
    image.save(turned, "PNG", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(plain, "PNG")
    answers = [post(client, content=f.getvalue()).json() for f in (turned, plain)]
    assert answers[0] == answers[1] != post(client).json()


# ---- batches ----


@pytest.mark.parametrize("build", [own_model, lambda: own_model("int8"), with_class_token])
def test_alone_or_together_every_bit_is_the_same(start, build):
    service = start(build(), Options(Settings(max_batch=5, max_wait=0.2)))
    asked = [(f"/predict?top=10&attention={i % 3 == 0}", picture(i)) for i in range(8)]
    asked += [("/embed", picture(i)) for i in range(4)]

    async def ask(together: bool) -> list[bytes]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(service), base_url="http://test"
        ) as client:
            one = [client.post(address, content=content) for address, content in asked]
            found = await asyncio.gather(*one) if together else [await each for each in one]
        assert {answer.status_code for answer in found} == {200}
        return [answer.content for answer in found]

    alone = asyncio.run(ask(False))
    assert number(service, "vitkern_batch_size_count") == len(asked)
    assert asyncio.run(ask(True)) == alone
    assert number(service, "vitkern_batch_size_count") < 1.75 * len(asked), "nothing was gathered"
    assert number(service, "vitkern_images_total") == 2 * len(asked)


def number(service, name: str) -> float:
    """The value of a metric without labels."""
    lines = service.metrics.text().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)


def held_back(service):
    """Make the engine stand still: (go, inside)."""
    go, inside, compute = threading.Event(), threading.Event(), service.batcher._compute

    def wait(works):
        inside.set()
        assert go.wait(10)
        return compute(works)

    service.batcher._compute = wait
    return go, inside


async def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        await asyncio.sleep(0.005)


def test_a_full_queue_says_when_to_come_back(start):
    service = start(options=Options(Settings(max_batch=1, queue=2)))
    go, inside = held_back(service)

    async def run():
        transport = httpx.ASGITransport(service)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = asyncio.ensure_future(client.post("/predict", content=picture()))
            await until(inside.is_set)
            rest = [asyncio.ensure_future(client.post("/embed", content=picture())) for _ in "ab"]
            await until(lambda: service.batcher.waiting == 2)
            refused = await client.post("/predict", content=picture())
            assert "vitkern_queue_depth 2.0" in (await client.get("/metrics")).text
            go.set()
            return refused, [answer.status_code for answer in await asyncio.gather(first, *rest)]

    refused, others = asyncio.run(run())
    assert others == [200, 200, 200]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"] == "queue_full" and "2 images wait" in refused.json()["message"]


def test_a_client_that_leaves_is_dropped_from_the_batch(start):
    service = start(options=Options(Settings(max_batch=4)))
    go, inside = held_back(service)

    async def call(gone: asyncio.Event | None) -> list[dict]:
        """The app as a server calls it; the client closes the connection at `gone`."""
        sent: list[dict] = []
        bodies = [{"type": "http.request", "body": picture(), "more_body": False}]

        async def receive():
            if bodies:
                return bodies.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"",
                 "headers": [(b"content-type", b"image/png")], "http_version": "1.1",
                 "scheme": "http", "server": ("test", 80), "client": ("test", 1)}  # fmt: skip
        await service(scope, receive, send)
        return sent

    async def run():
        gone = asyncio.Event()
        first = asyncio.ensure_future(call(None))
        await until(inside.is_set)
        leaves, stays = asyncio.ensure_future(call(gone)), asyncio.ensure_future(call(None))
        await until(lambda: service.batcher.waiting == 2)
        gone.set()
        await leaves
        assert service.batcher.waiting == 1
        go.set()
        return [(await one)[0]["status"] for one in (first, stays)]

    assert asyncio.run(run()) == [200, 200]
    said = service.metrics.text().decode()
    assert "vitkern_images_total 2.0" in said and "vitkern_dropped_total 1.0" in said
    assert 'vitkern_requests_total{endpoint="/predict",status="499"} 1.0' in said
    assert (service.accepted, service.answered, service.dropped) == (3, 2, 1)
    assert service.unsent == 0


# ---- refusals ----

BROKEN = picture(kind="JPEG", size=(300, 300))[:-2000]
REFUSED = {
    "empty": (400, b"", "image/png"),
    "bad_form": (400, b"--x\r\nno form", "multipart/form-data; boundary=x"),
    "media_type": (415, b"{}", "application/json"),
    "not_a_picture": (422, b"hello", "image/png"),
    "too_many_bytes": (413, b"x" * 200_001, "image/png"),
    "too_many_pixels": (413, picture(size=(101, 100)), "image/png"),
}


@pytest.fixture(scope="module")
def strict():
    from vitkern.serve.app import Service

    limits = Limits(200_000, 10_000)
    made = Service(with_class_token(), Options(limits=limits))
    yield TestClient(made, raise_server_exceptions=False)
    assert made.stop(10)


@pytest.mark.parametrize("word", REFUSED)
@pytest.mark.parametrize("address", ["/predict", "/embed"])
def test_refuses(strict, word, address):
    status, content, kind = REFUSED[word]
    found = post(strict, address, content, kind)
    assert found.status_code == status and found.json().keys() == {"error", "message"}
    assert found.json()["error"] == word and len(found.json()["message"]) > 20


@pytest.mark.parametrize(
    "content, said",
    [
        (BROKEN, "broken image (image file is truncated"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image that Pillow can read"),
        (b"GIF89a", "not an image"),
        (picture()[:60], "broken image"),
    ],
)
def test_broken_pictures_are_the_sender_s_error(client, content, said):
    found = post(client, content=content)
    assert found.status_code == 422 and said in found.json()["message"]


def test_a_bomb_is_refused_by_its_header(client):
    """30,000 x 30,000 pixels in some thousand bytes: nothing of it is decoded."""
    import struct
    import zlib

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    )
    begin = time.monotonic()
    found = post(client, content=bomb + chunk(b"IEND", b""))
    assert found.status_code == 413 and found.json()["error"] == "too_many_pixels"
    assert time.monotonic() - begin < 2


FIELD = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\nhello\r\n--x--\r\n'


def test_a_form_holds_one_file(client):
    found = post(client, content=FIELD, kind="multipart/form-data; boundary=x")
    assert found.status_code == 400 and "the form has no file" in found.json()["message"]
    found = client.post("/predict", files=[("a", picture(0)), ("b", picture(1))])
    assert found.status_code == 400 and "Too many files" in found.json()["message"]


def test_a_form_may_have_little_around_its_file(strict):
    padding = {"more": "x" * (FORM_ROOM + 200_000)}
    found = strict.post("/predict", data=padding, files={"image": picture()})
    assert found.status_code == 413


def test_a_body_without_a_length_is_cut_off(strict):
    sent = 0

    def chunks():
        nonlocal sent
        while sent < 10_000_000:
            sent += 50_000
            yield b"x" * 50_000

    assert strict.post("/predict", content=chunks()).status_code == 413


def test_a_slow_body_is_not_waited_for(start):
    service = start(options=Options(limits=Limits(seconds=0.05)))

    async def drip():
        yield b"x"
        await asyncio.sleep(5)

    async def run():
        transport = httpx.ASGITransport(service)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/predict", content=drip())

    found = asyncio.run(run())
    assert found.status_code == 408 and found.json()["error"] == "slow_body"
