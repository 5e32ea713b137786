"""A picture of pictures with lines of text below each: what `predict` and `search` save."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import ImageFont
    from PIL.Image import Image

THUMBNAIL, MARGIN, LINE = 192, 14, 17  # pixels
MOST_CELLS = 400
MOST_ACROSS = 6
FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".pdf")
BACKGROUND, INK, FAINT, BAR = "#ffffff", "#1b1f24", "#6b7280", "#cfe3ff"


class Caption(NamedTuple):
    """A line below a picture, with a bar behind it as long as its share of the width."""

    text: str
    share: float = 0.0
    faint: bool = False


class Cell(NamedTuple):
    picture: Image  # of the size of `thumbnail`, or smaller
    captions: Sequence[Caption]


def check_path(path: pathlib.Path) -> None:
    """Refuse a name that cannot be a picture's, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--save {path}: the picture's name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--save {path}: there is no folder {path.parent}")


def thumbnail(image: Image) -> Image:
    """A small copy, so that the large one can be forgotten."""
    from PIL import Image as pillow

    scale = min(THUMBNAIL / image.width, THUMBNAIL / image.height)
    size = [max(1, round(side * scale)) for side in image.size]
    how = pillow.Resampling.NEAREST if scale > 2 else pillow.Resampling.LANCZOS
    return image.resize((size[0], size[1]), how)


def draw(cells: Sequence[Cell], path: pathlib.Path, across: int | None = None) -> None:
    """Save the cells in rows of `across`; None is as near to a square as they go."""
    from PIL import Image as pillow
    from PIL import ImageDraw, ImageFont

    if across is None:
        across = min(MOST_ACROSS, max(1, math.ceil(math.sqrt(len(cells)))))
    down = math.ceil(len(cells) / across)
    lines = max(len(cell.captions) for cell in cells)
    wide, high = THUMBNAIL + MARGIN, THUMBNAIL + MARGIN + LINE * lines
    sheet = pillow.new("RGB", (across * wide + MARGIN, down * high + MARGIN), BACKGROUND)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for i, cell in enumerate(cells):
        left, top = MARGIN + i % across * wide, MARGIN + i // across * high
        inset = (THUMBNAIL - cell.picture.width) // 2, (THUMBNAIL - cell.picture.height) // 2
        sheet.paste(cell.picture, (left + inset[0], top + inset[1]))
        for j, caption in enumerate(cell.captions):
            y = top + THUMBNAIL + 3 + LINE * j
            if caption.share > 0:
                right = left + round(THUMBNAIL * min(caption.share, 1.0))
                pen.rectangle((left, y, right, y + LINE - 3), fill=BAR)
            text = _fitting(caption.text, font)
            pen.text((left + 2, y), text, fill=FAINT if caption.faint else INK, font=font)
    sheet.save(path)


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, with its middle left out where it is wider than a picture."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if font.getlength(text) <= THUMBNAIL - 4:
        return text
    for keep in range(len(text) // 2, 0, -1):
        shorter = f"{text[:keep]}...{text[-keep:]}"
        if font.getlength(shorter) <= THUMBNAIL - 4:
            return shorter
    return "..."
