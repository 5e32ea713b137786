"""Draw what a model learnt: filters, positions, attention distances, and where it looks in images.

Writes pictures and index.html, one page that holds them all, into a folder. Without --weights it is
the package's small model. Without IMAGE only what needs none is drawn.

Examples:
    vitkern inspect                                          # the package's own model, no image
    vitkern inspect dog.jpg --weights deit_tiny.safetensors --out looked-at
"""

from __future__ import annotations

import argparse
import base64
import html
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from ..model import ViT

MOST_IMAGES = 16  # on one page
MOST_COMPONENTS = 28  # of the filters, as the paper shows
INCHES = 1.15  # of a small picture's side


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="*", metavar="IMAGE")
    predict.model_arguments(parser)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("inspection"), metavar="FOLDER"
    )
    parser.add_argument("--format", choices=("png", "svg"), default="png")
    parser.add_argument(
        "--layer", type=int, default=-1, metavar="L", help="whose heads are drawn (the last)"
    )


class Picture(NamedTuple):
    """A figure, and what a reader should know about it."""

    name: str
    title: str
    words: str
    figure: Figure


def run(given: argparse.Namespace) -> int:
    from .. import image_sources, packed_file
    from ..measure import charts

    sources = image_sources.expand(given.images)
    if len(sources) > MOST_IMAGES:
        raise ValueError(f"{len(sources)} images, at most {MOST_IMAGES}: name fewer")
    given.precision = None  # a packed file's own
    predictor = predict.open_predictor(given)
    packed_file.with_parameters(predictor.model, "vitkern inspect").precision = "fp32"
    images = [predictor.prepared(source.read()) for source in sources]  # large ones are forgotten
    depth = len(predictor.model.blocks)
    if not -depth <= given.layer < depth:
        raise ValueError(f"--layer {given.layer}: the model has {depth} blocks, from 0")
    plt = charts.pyplot()
    given.out.mkdir(parents=True, exist_ok=True)
    page = [_opening(predictor)]
    for picture in _pictures(predictor, images, [s.name for s in sources], given.layer % depth):
        path = given.out / f"{picture.name}.{given.format}"
        picture.figure.savefig(path, dpi=130, bbox_inches="tight")
        plt.close(picture.figure)
        page.append(_section(picture, path))
        print(path)
    (given.out / "index.html").write_text("\n".join([*page, "</main></body></html>"]), "utf-8")
    print(given.out / "index.html")
    return 0


def _pictures(
    predictor: predict.Predictor, images: list[Tensor], names: list[str], layer: int
) -> Iterator[Picture]:
    import torch

    model = predictor.model
    yield _filters(model)
    yield from _positions(model)
    if not images:
        return
    pixels = torch.stack(images)
    yield _distances(model, pixels)
    with torch.inference_mode():
        shares = model(pixels).float().softmax(-1)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in predictor.normalisation)
    shown = (pixels * std + mean).clamp(0, 1)
    best = [predictor.names[int(row.argmax())] for row in shares]
    yield _rollouts(
        model, pixels, shown, [f"{b}, {row.max():.0%}" for b, row in zip(best, shares, strict=True)]
    )
    for i, name in enumerate(names):
        yield _heads(model, pixels[i : i + 1], shown[i], layer, i, pathlib.PurePath(name).name)


def _filters(model: ViT) -> Picture:
    from ..inspection import filters

    found = filters(model, MOST_COMPONENTS)
    colours = found.shape[1] == 3
    figure, axes = _grid(len(found), 7)
    for axis, one in zip(axes, found, strict=False):
        low, high = one.min(), one.max()
        picture = (one - low) / (high - low).clamp_min(1e-12)
        picture = picture.permute(1, 2, 0) if colours else picture.mean(0)
        axis.imshow(picture.numpy(), cmap="gray")
    words = "Principal components of the filters that make tokens of patches, largest first."
    if not colours:
        words += " Patches are cut from the stem's feature map: the mean of its channels is shown."
    return Picture("filters", "Patch filters", words, figure)


def _positions(model: ViT) -> Iterator[Picture]:
    from ..inspection import position_similarity

    found = position_similarity(model)
    if found is None:
        return
    down, across = model.config.grid
    step = max(1, -(-max(down, across) // 7))  # at most 7 x 7 small pictures
    rows, columns = range(0, down, step), range(0, across, step)
    figure, axes = _grid(len(rows) * len(columns), len(columns))
    for axis, (y, x) in zip(axes, ((y, x) for y in rows for x in columns), strict=False):
        axis.imshow(found[y, x].numpy(), vmin=-1, vmax=1, cmap="viridis")
    yield Picture(
        "positions", "Position similarity",
        "Each small picture is the cosine similarity of one patch's position with all others'.",
        figure,
    )  # fmt: skip


def _distances(model: ViT, pixels: Tensor) -> Picture:
    from ..inspection import attention_distances
    from ..measure import charts

    found = attention_distances(model, pixels)
    figure, axis = charts.pyplot().subplots(figsize=(6, 3.6))
    for layer, heads in enumerate(found):
        axis.scatter(
            [layer] * len(heads), heads.tolist(), s=14, color=charts.COLOURS["native"], alpha=0.75
        )
    axis.set_xlabel("block")
    axis.set_ylabel("mean attention distance (pixels)")
    axis.grid(alpha=0.25)
    words = "A dot is a head: how far away, on average, is what its patches attend to."
    return Picture("distances", "Attention distance", words, figure)


def _rollouts(model: ViT, pixels: Tensor, shown: Tensor, captions: list[str]) -> Picture:
    from ..inspection import rollout

    figure, axes = _grid(2 * len(shown), min(8, 2 * len(shown)), 1.7)
    for i, (image, seen) in enumerate(zip(shown, rollout(model, pixels), strict=True)):
        axes[2 * i].imshow(image.permute(1, 2, 0).numpy())
        axes[2 * i].set_title(captions[i][:40], fontsize=7)
        _over(axes[2 * i + 1], image, seen)
    words = "Attention rolled out through all blocks: which patches the answer depends on."
    return Picture("rollout", "Where the model looks", words, figure)


def _heads(
    model: ViT, pixels: Tensor, shown: Tensor, layer: int, number: int, name: str
) -> Picture:
    c = model.config
    maps = model.attention_maps(pixels, layer)[0, 0]  # (H, S, S)
    T = c.prefix_tokens
    row = maps[:, 0, T:] if c.class_token else maps[:, T:, T:].mean(1)
    figure, axes = _grid(len(row), min(8, len(row)), 1.4)
    for head, (axis, weights) in enumerate(zip(axes, row, strict=False)):
        _over(axis, shown, weights.view(c.grid))
        axis.set_title(f"head {head}", fontsize=7)
    whose = "the class token attends to" if c.class_token else "the patches attend to on average"
    words = f"{name}: what {whose} in block {layer}, head by head."
    return Picture(f"heads_{number}", "Heads", words, figure)


def _over(axis: Axes, image: Tensor, weights: Tensor) -> None:
    """Weights (y, x) as light on a dark image: none for the smallest, all for the largest."""
    from torch.nn.functional import interpolate

    size = image.shape[1:]
    low, high = weights.min(), weights.max()
    weights = (weights - low) / (high - low).clamp_min(1e-12)
    light = interpolate(weights[None, None].float(), size, mode="bilinear", align_corners=False)
    picture = image * (0.25 + 0.75 * light[0])
    axis.imshow(picture.permute(1, 2, 0).numpy())


def _grid(count: int, across: int, inches: float = INCHES) -> tuple[Figure, list[Axes]]:
    """A figure with at least `count` axes without ticks, row by row."""
    from ..measure import charts

    across = max(1, min(across, count))
    down = -(-count // across)
    size = (across * inches, down * inches)
    figure, axes = charts.pyplot().subplots(down, across, figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    return figure, list(axes.flat)


_STYLE = """body{margin:0;background:#f6f7f9;color:#1b1f24;font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1rem}section{background:#fff;border-radius:10px;
padding:1rem 1.5rem;margin:1.2rem 0;box-shadow:0 1px 3px #0002}img{max-width:100%}
pre{overflow:auto;font-size:.8rem}h1,h2{line-height:1.2}p{color:#4b5563}"""


def _opening(predictor: predict.Predictor) -> str:
    model, c = predictor.model, predictor.model.config
    down, across = c.pixels
    steps = [
        f"image {c.channels} x {down} x {across}",
        *(
            [f"stem {c.map_channels} x {c.grid[0] * c.patch_size} x {c.grid[1] * c.patch_size}"]
            if c.stem != "none"
            else []
        ),
        f"{c.patches} patches of {c.map_channels} x {c.patch_size} x {c.patch_size}",
        f"{c.tokens} tokens of {c.width}",
        f"{c.depth} blocks: {c.tokens} x {c.width} each",
        f"{c.pool}: {c.width}" if c.pool != "none" else f"{c.tokens} rows",
        f"{c.classes} classes",
    ]
    title = html.escape(pathlib.PurePath(predictor.source).name)
    table = html.escape(model.summary(show=False).text)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<main><h1>{title}</h1><section><h2>Step by step</h2><p>{' &rarr; '.join(steps)}</p>"
        f"<details><summary>All layers</summary><pre>{table}</pre></details></section>"
    )


def _section(picture: Picture, path: pathlib.Path) -> str:
    kind = {"png": "image/png", "svg": "image/svg+xml"}[path.suffix[1:]]
    data = base64.b64encode(path.read_bytes()).decode()
    words = html.escape(picture.words)
    return (
        f"<section><h2>{html.escape(picture.title)}</h2><p>{words}</p>"
        f"<img alt='{words}' src='data:{kind};base64,{data}'></section>"
    )
