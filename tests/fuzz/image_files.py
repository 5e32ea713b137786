"""Damaged photographs, through `vitkern.image_files` and `vitkern predict`."""

from __future__ import annotations

import functools
import io
import os
import pathlib
import random
import struct
import zlib

from PIL import Image, features

from vitkern import image_files

from .outcome import OK, REFUSED, Case, refused
from .weight_files import classify, save, state

MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "1", "P", "I;16"), "JPEG": ("RGB", "L", "CMYK"),
    "GIF": ("P", "L"), "BMP": ("RGB", "1", "P"), "TIFF": ("RGB", "F", "I;16", "CMYK", "LAB"),
    "PPM": ("RGB", "L"), "TGA": ("RGB",), "ICO": ("RGBA",), "WEBP": ("RGB", "RGBA"),
    "AVIF": ("RGB", "RGBA"), "JPEG2000": ("RGB",), "PCX": ("RGB",), "SGI": ("RGB",),
    "DDS": ("RGBA",), "QOI": ("RGB",), "XBM": ("1",), "ICNS": ("RGBA",), "IM": ("RGB", "F"),
}  # fmt: skip
OPTIONAL = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}
FORMATS = [name for name in MODES if name not in OPTIONAL or features.check(OPTIONAL[name])]
USUAL = [name for name in ("PNG", "JPEG", "WEBP", "AVIF", "AVIF", "GIF") if name in FORMATS]
SIZES = ((20, 20), (1, 1), (1, 300), (300, 1), (17, 33), (64, 48))


@functools.cache
def encoded(name: str, mode: str, size: tuple[int, int], more: str = "") -> bytes:
    """A picture of noise in a format; `more`: "animated" or "turned" (an EXIF orientation)."""
    noise = random.Random(repr((name, mode, size))).randbytes(size[0] * size[1] * 4)
    image = Image.frombytes("RGBA", size, noise).convert("RGB")
    image = image.convert("L").convert(mode) if mode in ("I;16", "LAB") else image.convert(mode)
    options: dict[str, object] = {}
    if more == "animated" and name in ("GIF", "WEBP", "PNG", "TIFF", "AVIF"):
        options = {"save_all": True, "append_images": [image, image]}
    if more == "turned" and name in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        exif = Image.Exif()
        exif[0x0112] = 6
        options = {"exif": exif}
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    name = rng.choice(USUAL if rng.random() < 0.5 else FORMATS)
    mode, size = rng.choice(MODES[name]), rng.choice(SIZES)
    more = rng.choice(("", "", "animated", "turned"))
    damages = [rng.choice(DAMAGES) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    seed, by_command = rng.randrange(2**31), rng.random() < 0.5
    suffix = rng.choice(("", ".png", ".jpg", f".{name.lower()}"))
    words = ", ".join(damage.__name__ for damage in damages) or "whole"
    how = "classify" if by_command else "cli.images.read"

    def run() -> str:
        folder.mkdir()
        try:
            content = encoded(name, mode, size, more)
        except (OSError, ValueError, KeyError):  # this Pillow does not write it
            content = encoded("PNG", "RGB", size)
        own, path = random.Random(seed), folder / f"picture{suffix}"
        for damage in damages:
            content = damage(own, content)
        path.write_bytes(content)
        if not damages and own.random() < 0.1:
            os.truncate(path, 2**36)
        if by_command:
            weights = folder / "weights.safetensors"
            save(state(), weights)
            return classify(weights, path, path)
        return REFUSED if refused(lambda: read(path)) else OK

    return Case(f"{how} {name} {mode} {size} {more}: {words} ({seed})", run)


def read(path: pathlib.Path) -> None:
    image = image_files.read(path)
    assert image.mode == "RGB"
    assert image_files.prepare(image, (16, 16)).isfinite().all()


# ---- damages: of the bytes ----


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.choice((0, 1, 12, rng.randrange(len(content) + 1), -1, -20))]


def flipped(rng: random.Random, content: bytes) -> bytes:
    spoilt = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 2, 8, 64))):
        reach = min(len(spoilt), rng.choice((64, 512, 2**30)))
        spoilt[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def extremes(rng: random.Random, content: bytes) -> bytes:
    """Bytes that are lengths and counts in most formats."""
    spoilt = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 2, 4))):
        start = rng.randrange(min(len(spoilt), rng.choice((64, 256, 2**30))))
        word = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x80"))
        spoilt[start : start + 4] = word
    return bytes(spoilt)


def repeated(rng: random.Random, content: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:b] + content[a:b] * rng.choice((1, 3)) + content[b:]


def without_middle(rng: random.Random, content: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:a] + content[b:]


def spliced(rng: random.Random, content: bytes) -> bytes:
    """The header of one format, the rest of another."""
    name = rng.choice(FORMATS)
    other = encoded(name, MODES[name][0], (20, 20))
    place = rng.choice((4, 8, 16, 64))
    return content[:place] + other[place:]


def as_png(rng: random.Random, content: bytes) -> bytes:
    """A PNG whose parts have the right checksums, but odd facts in them."""
    wide = rng.choice((0, 1, 2**31 - 1, 20000, 60000))
    high = rng.choice((0, 1, 2**31 - 1, 20000, 3))
    depth, colour = rng.choice((0, 1, 8, 16, 255)), rng.choice((0, 2, 3, 4, 6, 9))
    facts = struct.pack(">IIBBBBB", wide, high, depth, colour, 0, 0, rng.choice((0, 1, 2)))
    data = rng.choice((b"", zlib.compress(b"\0" * 10**6), b"abc", zlib.compress(b"\0")))
    extra = rng.choice(((), ((b"tEXt", b"a\0" + b"b" * 10**6),), ((b"PLTE", b"abc"),),
                        ((b"eXIf", b"MM\0*" + b"\xff" * 50),), ((b"acTL", b"\xff" * 8),),
                        ((b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 10**8)),)))  # fmt: skip
    parts = ((b"IHDR", facts), *extra, (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d))
        for kind, d in parts
    )


def something_else(rng: random.Random, content: bytes) -> bytes:
    wanted = (b"", b"\0" * 1000, b"hello", b"<svg/>", b"%PDF-1.4", rng.randbytes(500), b"GIF89a",
              b"P6 99999 99999 255\n", b"P6 -1 -1 255\n", b"P5 2 2 70000\n1234", b"#")  # fmt: skip
    return rng.choice(wanted)


DAMAGES = (
    cut, flipped, flipped, flipped, extremes, extremes, repeated, without_middle, spliced, as_png,
    something_else,
)  # fmt: skip
