"""Predicts ViT-B/16's forward on GPUs by a roofline, for docs/gpu_prediction.md. Not measured.

    python -m tools.gpu_prediction            # writes the tables between the page's markers
    python -m tools.gpu_prediction --check    # status 1 if the page is old

A launch takes the longest of: its multiplications in waves of tiles (gpu/tiles.py), its reads of
L2, its bytes of DRAM (each tensor once, as tools/gpu_traffic.py counts them); and the gap behind
the launch before. The host issues launches meanwhile: a forward takes at least that long. Peers go
by the same rules, with cuBLAS at its best: our tile shapes at the tensor cores' full rate, no limit
by L2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tools import page_table
from tools.gpu_traffic import META, Eager, FusedAttention, of_launch
from tools.gpu_waves import MODELS, PAGE, Choice, Gemm, chosen, fullest, nearly_fullest, share
from vitkern import ViT, ViTConfig
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import hardware, tiles
from vitkern.gpu.launch import Launch, Recorder, executing

BEGIN, END = "<!-- prediction -->", "<!-- end of prediction -->"
BATCHES = (1, 8, 64, 256)
CONFIG = ViTConfig.named("B/16")
DEPTH = CONFIG.depth
GAP = 1.5e-6  # seconds from a kernel's end to the next one's first work, in a stream or a graph
HOST = {"vitkern": 2.5e-6, "eager": 6e-6, "flash": 0.0}  # seconds to issue a launch


class Board(NamedTuple):
    """What gpu/hardware.py does not have, from the same sources."""

    arch: str
    clock: float  # Hz, the highest
    dram: float  # bytes per second
    attention: float  # the forward's static ceiling (docs/gpu_kernels.md); AMD's is A100's


BOARDS = {
    "A100": Board("sm_80", 1.41e9, 2.039e12, 1.0),
    "L40S": Board("sm_89", 2.52e9, 0.864e12, 1.0),
    "H100": Board("sm_90", 1.83e9, 3.35e12, 0.89),
    "B200": Board("sm_100", 1.85e9, 8.0e12, 0.49),
    "MI300X": Board("gfx942", 2.1e9, 5.3e12, 1.0),
}


class Work(NamedTuple):
    """One launch: bytes of DRAM, and what it multiplies."""

    moved: int
    gemm: tuple[int, int, int] | None = None  # M, N, K
    kernel: str = ""  # of vitkern's tiles; none: cuBLAS
    attention: tuple[int, int, int, int] | None = None  # B, H, queries, keys; heads of 64


class Works(NamedTuple):
    """Of the same forward with two blocks and with three: the others are like the third."""

    two: list[Work]
    three: list[Work]


def seconds(work: Work, board: Board, choice: Choice = chosen) -> float:
    chip = hardware.CHIPS[board.arch]
    clocks = 0.0
    if work.gemm:
        clocks = _gemm_clocks(work, board.arch, chip.processors, choice)
    elif work.attention:
        B, H, queries, keys = work.attention
        waves = math.ceil(B * H * math.ceil(queries / 64) / chip.processors)
        clocks = waves * 4 * 64 * keys * 64 / (chip.tensor * board.attention)
    return max(clocks / board.clock, work.moved / board.dram) + GAP


def _gemm_clocks(work: Work, arch: str, processors: int, choice: Choice) -> float:
    assert work.gemm is not None
    M, N, K = work.gemm
    if work.kernel:
        row = choice(Gemm(work.kernel, N, K), arch, M, processors)
        return K * tiles.clocks(row, arch, 16, M, N, processors)
    rows = tiles.fitting("folded_linear", arch, 16)
    areas = (tiles.waves(r, M, N, processors) * r.blocks["BM"] * r.blocks["BN"] for r in rows)
    return K * min(areas) * 2 / hardware.flops(arch, 16)


def forward(works: Works, board: Board, host: float, choice: Choice = chosen) -> float:
    """Seconds of a forward: the GPU's time, or the host's if it issues more slowly."""
    short, long = (sum(seconds(work, board, choice) for work in some) for some in works)
    count = len(works.two) + (DEPTH - 2) * (len(works.three) - len(works.two))
    return max(short + (DEPTH - 2) * (long - short), count * host)


# ---- what is launched ----------------------------------------------------------------------------


def ours(batch: int, board: Board) -> Works:
    return Works(*(_ours(CONFIG.replace(depth=n), batch, board) for n in (2, 3)))


def _ours(config: ViTConfig, batch: int, board: Board) -> list[Work]:
    model = ViT(config, **META).eval()
    recorder = Recorder(board.arch)
    image = torch.empty(batch, config.channels, config.image_size, config.image_size, **META)
    y = torch.empty(batch, config.classes, **META)
    engine = GpuEngine(model, "bf16", recorder)
    with torch.no_grad(), executing(recorder):
        engine.start("logits", image, y)
    return [_work(launch) for launch in recorder.launches]


def _work(launch: Launch) -> Work:
    moved, given = of_launch(launch).moved, launch.arguments
    name = launch.kernel.__name__.removesuffix("_forward")
    if name in tiles.TILES:
        return Work(moved, (given["M"], given["N"], given["K"]), name)
    if name == "patch_embed":  # as linear_residual's tiles
        D, P = given["weight"].shape[0], given["weight"][0].numel()
        return Work(moved, (given["B"] * given["patches"][0], D, P), "linear_residual")
    if name == "attention":
        B, S, _, H, _ = given["qkv"].shape
        return Work(moved, attention=(B, H, given["queries"], S))
    return Work(moved)


class Recorded(Eager):
    """PyTorch's operators, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self.names: list[str] = []
        self._name, self._gemm = "attention", None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self._name, self._gemm = name, _gemm(name, args)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._name, self._gemm = "attention", None

    def add(self, inputs: list, results: list) -> None:
        before = self.total.moved
        super().add(inputs, results)
        heads = None
        if self._name == "attention":
            B, H, S, _ = inputs[0].shape
            heads = (B, H, S, S)
        self.works.append(Work(self.total.moved - before, self._gemm, attention=heads))
        self.names.append(self._name)


def _gemm(name: str, args: tuple) -> tuple[int, int, int] | None:
    if name in ("mm", "addmm"):
        a, b = args[-2:]
        return a.shape[0], b.shape[1], a.shape[1]
    if name == "convolution":  # the patches
        image, weight = args[:2]
        D, _, py, px = weight.shape
        M = image.shape[0] * (image.shape[2] // py) * (image.shape[3] // px)
        return M, D, weight[0].numel()
    return None


def eager(batch: int) -> tuple[Works, Works]:
    """Eager's launches; and those of its kernels in a graph with GELU in fc1's epilogue."""
    found = [_eager(CONFIG.replace(depth=n), batch) for n in (2, 3)]
    return Works(*(all_of for all_of, _ in found)), Works(*(fused for _, fused in found))


def _eager(config: ViTConfig, batch: int) -> tuple[list[Work], list[Work]]:
    model, counter = ViT(config, **META).eval(), Recorded()
    image = torch.empty(batch, config.channels, config.image_size, config.image_size, **META)
    with torch.no_grad(), FusedAttention(counter), counter:
        model.reference_forward(image)
    assert sum(work.gemm is not None for work in counter.works) == 4 * config.depth + 2
    fused = [w for w, name in zip(counter.works, counter.names, strict=True) if name != "gelu"]
    return counter.works, fused


def table(batches: Sequence[int] = BATCHES, boards: Collection[str] = tuple(BOARDS)) -> str:
    """Markdown."""
    text = "| predicted, not measured | batch | vitkern | eager | FlashAttention-2 + cuBLAS |"
    text += " eager / vitkern | FA-2 + cuBLAS / vitkern |\n|---|--:|--:|--:|--:|--:|--:|\n"
    for batch in batches:
        theirs, fused = eager(batch)
        for name in boards:
            board = BOARDS[name]
            times = (
                forward(ours(batch, board), board, HOST["vitkern"]),
                forward(theirs, board, HOST["eager"]),
                forward(fused, board, HOST["flash"]),
            )
            cells = [f"{1e3 * time:.2f} ms" for time in times]
            cells += [f"{time / times[0]:.2f}" for time in times[1:]]
            text += f"| {name} | {batch} | " + " | ".join(cells) + " |\n"
    return text


# Where the fullest tiles fill much more than the chosen ones.
BESIDE = [(name, batch) for batch in (1, 3, 8) for name in ("H100", "B200")]


def beside_fullest(cells: Sequence[tuple[str, int]] = BESIDE) -> str:
    """Markdown: what a block's GEMMs fill, and a forward's time, by the choice and by fuller tiles.

    The GPU's time: a graph's launches, which the host does not hold up.
    """
    ways = {"chosen": chosen, "fastest with 95 % of the fullest": nearly_fullest}
    ways["fullest"] = fullest
    text = f"| predicted, not measured | batch | {' | '.join(ways)} |\n|---|--:|--:|--:|--:|\n"
    width, tokens = MODELS["B/16"]
    for name, batch in cells:
        board = BOARDS[name]
        processors, works = hardware.CHIPS[board.arch].processors, ours(batch, board)
        made = []
        for way in ways.values():
            filled = share(way, board.arch, processors, width, batch * tokens).filled
            made.append(f"{filled:.0%} filled, {1e3 * forward(works, board, 0.0, way):.2f} ms")
        text += f"| {name} | {batch} | {' | '.join(made)} |\n"
    return text


def main(arguments: list[str] | None = None) -> int:
    return page_table.main(
        __doc__, PAGE, (BEGIN, END), lambda: f"{table()}\n{beside_fullest()}", arguments
    )


if __name__ == "__main__":
    sys.exit(main())
