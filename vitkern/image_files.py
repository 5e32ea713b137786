"""Photographs in: decoding with clear refusals, and the standard evaluation crop."""

from __future__ import annotations

import contextlib
import io
import pathlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# 300 MB as RGB; a larger file is more likely an attack or a map than a photograph.
LARGEST_PIXELS = 100_000_000
# Formats of photographs. Of Pillow's others some start another program (EPS), and all of them are
# more for an attacker to try than for a user to send.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "MPO", "TGA")
CROP_SHARE = 0.875  # of the short side: 224 of 256, as ViT and DeiT are evaluated
LONGEST_SHARE = 4  # times the short side; the centre crop never sees what lies beyond

Statistics = tuple[Sequence[float], Sequence[float]]  # mean and std, a value for each channel
NORMALISATIONS: dict[str, Statistics] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # DeiT, DINOv2
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # the original ViT and AugReg
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


def read(path: pathlib.Path) -> Image:
    """An upright RGB image; a ValueError or OSError says what is wrong with the file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a folder, expected an image")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return _open(path, str(path))


class TooManyPixels(ValueError):
    """The header asks for more pixels than are decoded."""


def decode(content: bytes, name: str, largest: int | None = None) -> Image:
    """The same of a file's bytes; errors call it `name`. largest: pixels that are decoded, None
    for LARGEST_PIXELS.
    """
    return _open(io.BytesIO(content), name, largest)


class _Quiet:
    """No warnings while any thread decodes: `warnings.catch_warnings` is of one thread alone."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._saved = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._saved.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._saved.close()


_quiet = _Quiet()


def _open(file: pathlib.Path | io.BytesIO, name: str, largest: int | None = None) -> Image:
    largest = LARGEST_PIXELS if largest is None else largest
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        needs = "reading images needs Pillow: pip install 'vitkern[images]'"
        raise ImportError(needs) from error
    with _quiet():  # about bombs, where the limit below is stricter, and about tags
        try:
            Image.init()
            known = [kind for kind in FORMATS if kind in Image.OPEN]
            with Image.open(file, formats=known) as image:  # reads the header only
                width, height = image.size
                if 0 < width * height <= largest:
                    return ImageOps.exif_transpose(image).convert("RGB")
        except UnidentifiedImageError as error:
            raise ValueError(
                f"{name}: not an image that Pillow can read, or none of {', '.join(known)}"
            ) from error
        except Image.DecompressionBombError as error:
            raise TooManyPixels(f"{name}: far too many pixels: scale it down first") from error
        except Exception as error:  # a damaged file makes decoders raise anything
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{name}: broken image ({why}): replace it") from error
    if not width * height:
        raise ValueError(f"{name}: broken image ({width} x {height} pixels): replace it")
    raise TooManyPixels(
        f"{name}: {width} x {height} pixels are too many: scale it down to at most {largest:,}"
    )


class _Cut(NamedTuple):
    """How an image becomes a crop: trim it, scale what is left, cut. Boxes are Pillow's."""

    trim: tuple[int, int, int, int]
    scaled: tuple[int, int]
    crop: tuple[int, int, int, int]


def _cut(image_size: tuple[int, int], size: tuple[int, int], share: float) -> _Cut:
    trim = _trim(image_size)
    y, x = size
    width, height = trim[2] - trim[0], trim[3] - trim[1]
    scale = max(y / height, x / width) / share
    wide, high = (max(1, round(side * scale)) for side in (width, height))
    left, top = round((wide - x) / 2), round((high - y) / 2)
    return _Cut(trim, (wide, high), (left, top, left + x, top + y))


def prepare(
    image: Image,
    size: tuple[int, int],
    normalisation: str | Statistics = "imagenet",
    share: float = CROP_SHARE,
) -> Tensor:
    """Short side to size / share (bicubic), centre crop, normalise: a (3, Y, X) float tensor.

    normalisation: a name of NORMALISATIONS, or mean and std themselves.
    """
    import torch

    cut = bytearray(crop(image, size, share).tobytes())
    pixels = torch.frombuffer(cut, dtype=torch.uint8).view(*size, 3)
    if isinstance(normalisation, str):
        normalisation = NORMALISATIONS[normalisation]
    return normalised(pixels, normalisation)


def crop(image: Image, size: tuple[int, int], share: float = CROP_SHARE) -> Image:
    """The first half of `prepare`, without torch: `size` pixels (Y, X) of the middle."""
    from PIL import Image

    cut = _cut(image.size, size, share)
    return image.crop(cut.trim).resize(cut.scaled, Image.Resampling.BICUBIC).crop(cut.crop)


def normalised(pixels: Tensor, normalisation: Statistics) -> Tensor:
    """The second half: bytes (..., Y, X, 3) as floats (..., 3, Y, X) of mean 0 and std 1."""
    import torch

    mean, std = (torch.tensor(v, device=pixels.device).view(3, 1, 1) for v in normalisation)
    return (pixels.movedim(-1, -3).float() / 255 - mean) / std


def seen_part(
    image_size: tuple[int, int], size: tuple[int, int], share: float = CROP_SHARE
) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of what `prepare` keeps, as shares of the image's sides.

    image_size: (width, height). Of an image narrower than the crop they pass 0 and 1.
    """
    (trim_left, trim_top, trim_right, trim_bottom), scaled, crop = _cut(image_size, size, share)
    across, down = (trim_right - trim_left) / scaled[0], (trim_bottom - trim_top) / scaled[1]
    left, right = (trim_left + side * across for side in (crop[0], crop[2]))
    top, bottom = (trim_top + side * down for side in (crop[1], crop[3]))
    width, height = image_size
    return left / width, top / height, right / width, bottom / height


def _trim(image_size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box without the far ends of a very long image, which is enlarged afterwards."""
    keep = LONGEST_SHARE * min(image_size)
    wide, high = (min(side, keep) for side in image_size)
    left, top = (image_size[0] - wide) // 2, (image_size[1] - high) // 2
    return left, top, left + wide, top + high
