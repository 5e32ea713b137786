"""The project's pictures: one colour per provider, titled with where the measurements come from."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = {
    "torch": "#7f7f7f",
    "torch_math": "#bfbfbf",
    "timm": "#E69F00",
    "flash_attn": "#D55E00",
    "compile": "#009E73",
    "compile_max": "#F0E442",
    "onnxruntime": "#E69F00",  # never beside timm
    "openvino": "#CC79A7",  # nor beside TensorRT
    "tensorrt": "#CC79A7",
    "native_graph": "#56B4E9",
    "native": "#0072B2",
}
NAMES = {
    "torch": "PyTorch eager",
    "torch_math": "PyTorch eager, attention written out",
    "timm": "timm eager",
    "flash_attn": "flash-attn",
    "compile": "torch.compile",
    "compile_max": "torch.compile, max-autotune",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "tensorrt": "TensorRT",
    "native_graph": "vitkern in a CUDA graph",
    "native": "vitkern",
}


STRIP, PHOTOGRAPH = 1.7, 1.2  # inches below the bars for photographs that were named; their sides


class Answer(NamedTuple):
    """A photograph and what a model says of it: (label, probability), the best first."""

    name: str
    picture: Image
    top: Sequence[tuple[str, float]]


def pyplot() -> ModuleType:
    """matplotlib without a window; a clear error where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "path",
        }
    )
    matplotlib.rcParams["svg.hashsalt"] = "vitkern"  # the same rows give the same file
    from matplotlib import pyplot as plt

    return plt


def speedup_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    path: pathlib.Path,
    title: str,
    subtitle: str,
    answers: Sequence[Answer] = (),
    named_by: str = "",
) -> pathlib.Path:
    """Bars of speed relative to eager PyTorch (1.0); rows are (label, {provider: ratio}).

    answers: at most three photographs with their best classes, drawn below the bars under the
    heading `named_by`.
    """
    plt = pyplot()
    providers = [p for p in COLOURS if any(p in ratios for _, ratios in rows)]
    bar = 0.8 / max(1, len(providers))
    strip = STRIP if answers else 0.0
    height = strip + 1.6 + 0.19 * len(rows) * max(2, len(providers))
    figure, axis = plt.subplots(figsize=(8, height))
    for i, provider in enumerate(providers):
        places = [y + (i - (len(providers) - 1) / 2) * bar for y in range(len(rows))]
        ratios = [ratio.get(provider, 0.0) for _, ratio in rows]
        axis.barh(places, ratios, height=bar, color=COLOURS[provider], label=NAMES[provider])
        for place, ratio in zip(places, ratios, strict=True):
            if ratio and provider != "torch":
                axis.text(ratio, place, f" {ratio:.2f}×", va="center", fontsize=7)
    axis.axvline(1.0, color=COLOURS["torch"], linewidth=1, zorder=0)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.margins(x=0.1)
    axis.set_xlabel("speed relative to eager PyTorch (longer is faster)")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
    arrange(figure, strip / height)
    if answers:
        _draw_answers(figure, answers, named_by)
    return save(figure, path, title, subtitle, arranged=True)


def _draw_answers(figure: Figure, answers: Sequence[Answer], heading: str) -> None:
    """Along the bottom: each photograph, and its classes with bars as long as they are likely."""
    width, height = figure.get_size_inches()

    def inches(left: float, bottom: float, across: float, up: float) -> Axes:
        axis = figure.add_axes((left / width, bottom / height, across / width, up / height))
        axis.axis("off")
        return axis

    edge, gap = 0.1, 0.08
    figure.text(edge / width, (STRIP - 0.28) / height, heading, weight="bold")
    cell = min(0.5, 1 / len(answers)) * (width - 2 * edge)
    for i, answer in enumerate(answers):
        left = edge + i * cell
        photograph = inches(left, edge, PHOTOGRAPH, PHOTOGRAPH)
        photograph.imshow(answer.picture)
        photograph.set_anchor("W")
        beside = inches(left + PHOTOGRAPH + gap, edge, cell - PHOTOGRAPH - 3 * gap, PHOTOGRAPH)
        beside.set(xlim=(0, 1), ylim=(len(answer.top) - 0.5, -0.5))
        places = range(len(answer.top))
        beside.barh(places, [share for _, share in answer.top], height=0.8, color="#cfe3ff")
        for place, (label, share) in zip(places, answer.top, strict=True):
            beside.text(0, place, f" {share:.0%} {label}", va="center", fontsize=8)


def roofs(
    axis: Axes, limits: Mapping[str, Any], precision: str, frame: tuple[float, float, float]
) -> None:
    """The machine's measured limits: multiply-adds, and reads of each level of memory.

    limits: {"multiply_gflops": {precision: ...}, "read_gbs": {"L2": ..., "L3": ..., "memory": ...}}
    frame: the least and the most flops per byte, the least GFLOPS.
    """
    left, right, bottom = frame
    roof = limits["multiply_gflops"][precision]
    for place, line in (("L2", ":"), ("L3", "--"), ("memory", "-")):
        gbs = limits["read_gbs"][place]
        start, knee = max(left, bottom / gbs), roof / gbs
        axis.plot([start, knee], [gbs * start, roof], line, color="black", lw=1)
        at = start * (knee / start) ** 0.03
        axis.text(
            at, gbs * at * 1.2, f"{place} {gbs:.0f} GB/s", fontsize=7.5, rotation_mode="anchor",
            rotation=math.degrees(math.atan(gbs)), transform_rotates_text=True,
        )  # fmt: skip
    knee = roof / limits["read_gbs"]["L2"]
    axis.plot([knee, right], [roof, roof], color="black", lw=1)
    axis.text(knee, roof * 1.06, f"multiply-adds, {roof:.0f} GFLOPS", fontsize=7.5)


def arrange(figure: Figure, bottom: float = 0.0) -> None:
    """The final layout: all that is drawn so far, below the two lines of the title, above `bottom`
    (a share of the height)."""
    figure.tight_layout(rect=(0, bottom, 1, 1 - 0.45 / figure.get_size_inches()[1]))


def save(
    figure: Figure, path: pathlib.Path, title: str, subtitle: str, arranged: bool = False
) -> pathlib.Path:
    """Title the figure, write it in the format that the path's ending names, and close it."""
    plt = pyplot()
    height = figure.get_size_inches()[1]
    figure.text(0.01, 1 - 0.05 / height, title, fontsize=12, weight="bold", va="top")
    figure.text(0.01, 1 - 0.30 / height, subtitle, fontsize=7.5, color="#444444", va="top")
    if not arranged:
        arrange(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)
    plt.close(figure)
    return path
