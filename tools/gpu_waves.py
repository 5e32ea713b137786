"""The share of a GPU's time that the GEMMs' tiles fill, for docs/gpu_prediction.md, with gates.

    python -m tools.gpu_waves            # writes the table between the page's markers
    python -m tools.gpu_waves --check    # status 1 if the page is old or a gate fails

*Filled* is the share of the multiprocessors' time with work on elements of the result: what the
last wave and the tiles' edges leave. *Rate* is the share of the tensor cores' peak that is left
after the tile's own static ceiling and L2 as well, which is what the choice goes by: a tile that
fills more can be the slower one. Arithmetic (gpu/tiles.py), not a measurement.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tools import page_table
from vitkern.gpu import hardware, tiles
from vitkern.gpu.configs import Row

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "gpu_prediction.md"
BEGIN, END = "<!-- wave table -->", "<!-- end of wave table -->"
BOARDS = {  # name -> architecture, multiprocessors
    "A100": ("sm_80", 108),
    "RTX 4090": ("sm_89", 128),
    "H100": ("sm_90", 132),
    "B200": ("sm_100", 148),
    "MI300X": ("gfx942", 304),
}
MODELS = {  # name -> width, tokens
    "S/16": (384, 197),
    "B/16": (768, 197),
    "L/16": (1024, 197),
    "B/16 at 384": (768, 577),
}
BATCHES = range(1, 257)
SHOWN = (1, 2, 3, 4, 8, 16, 32, 64, 256)

# Gates. The choice fills BEST of what any tile of the set fills that is no slower; of what the
# fullest ones fill, whatever their time, it does so at NEAR batches of 256. Filled: ONE for
# batch 1, and FULL in a share of MOST of the batches from 3 on. These two are floors just below
# what the choice by clocks gives, so that it cannot fall: wherever it is lower than 55 % and 75 %,
# the tile that fills more is the slower one (the page has the table, with both).
BEST = 0.95
FULL = 0.75
NEAR = {  # of BOARDS in order
    "S/16": (160, 120, 28, 14, 91),
    "B/16": (208, 186, 114, 97, 125),
    "L/16": (219, 203, 148, 137, 154),
    "B/16 at 384": (233, 231, 206, 201, 210),
}
MOST = {"S/16": 0.78, "B/16": 0.9, "L/16": 0.93, "B/16 at 384": 0.98}
ONE = {"S/16": 0.36, "B/16": 0.51, "L/16": 0.49, "B/16 at 384": 0.54}
ONE_MI300X = {"S/16": 0.2, "B/16": 0.35, "L/16": 0.42, "B/16 at 384": 0.65}


class Gemm(NamedTuple):
    kernel: str
    N: int
    K: int


def gemms(width: int) -> tuple[Gemm, ...]:
    """Those of a block in a plan."""
    return (
        Gemm("folded_linear", 3 * width, width),
        Gemm("linear_residual", width, width),
        Gemm("folded_linear", 4 * width, width),
        Gemm("linear_residual", width, 4 * width),
    )


Choice = Callable[[Gemm, str, int, int], Row]  # of a GEMM, on an architecture, for rows, processors


def chosen(gemm: Gemm, arch: str, M: int, processors: int) -> Row:
    return tiles.choose(gemm.kernel, arch, 16, M, gemm.N, processors)


def by_rows(gemm: Gemm, arch: str, M: int, processors: int) -> Row:
    """What the table said before: 64 x 64 up to 512 rows, then the largest tile."""
    rows = tiles.fitting(gemm.kernel, arch, 16)
    few = next(row for row in rows if (row.blocks["BM"], row.blocks["BN"]) == (64, 64))
    return few if M <= 512 else rows[0]


def fullest(gemm: Gemm, arch: str, M: int, processors: int) -> Row:
    rows = tiles.fitting(gemm.kernel, arch, 16)
    return max(rows, key=lambda row: tiles.filled(row, M, gemm.N, processors))


def nearly_fullest(gemm: Gemm, arch: str, M: int, processors: int) -> Row:
    """The fastest of the tiles that fill BEST of what the fullest fills."""
    rows = tiles.fitting(gemm.kernel, arch, 16)
    filled = [tiles.filled(row, M, gemm.N, processors) for row in rows]
    near = [row for row, part in zip(rows, filled, strict=True) if part >= BEST * max(filled)]
    return min(near, key=lambda row: tiles.clocks(row, arch, 16, M, gemm.N, processors))


class Share(NamedTuple):
    """Of a block's GEMMs together."""

    filled: float
    rate: float  # of the tensor cores' peak


def share(choice: Choice, arch: str, processors: int, width: int, M: int) -> Share:
    work = time = clocks = 0.0
    for gemm in gemms(width):
        row = choice(gemm, arch, M, processors)
        size = M * gemm.N * gemm.K
        work += size
        time += size / tiles.filled(row, M, gemm.N, processors)
        clocks += gemm.K * tiles.clocks(row, arch, 16, M, gemm.N, processors)
    return Share(work / time, 2 * work / (clocks * processors * hardware.flops(arch, 16)))


def better(gemm: Gemm, arch: str, M: int, processors: int) -> Row | None:
    """A tile that is faster than the chosen one, or no slower and fills more; or None."""
    row = chosen(gemm, arch, M, processors)
    taken = tiles.clocks(row, arch, 16, M, gemm.N, processors)
    filled = tiles.filled(row, M, gemm.N, processors)
    for other in tiles.fitting(gemm.kernel, arch, 16):
        clocks = tiles.clocks(other, arch, 16, M, gemm.N, processors)
        fuller = BEST * tiles.filled(other, M, gemm.N, processors) > filled
        if clocks < BEST * taken or (clocks <= taken and fuller):
            return other
    return None


def near(model: str, board: str) -> int:
    """At how many batch sizes the choice fills BEST of what the fullest tiles fill."""
    (width, tokens), (arch, processors) = MODELS[model], BOARDS[board]
    ways = (chosen, fullest)
    found = (
        [share(way, arch, processors, width, batch * tokens).filled for way in ways]
        for batch in BATCHES
    )
    return sum(ours >= BEST * most for ours, most in found)


def too_few_near(model: str, board: str) -> Iterator[str]:
    """The gate on `near`, a line if it fails."""
    reached, least = near(model, board), NEAR[model][list(BOARDS).index(board)]
    if reached < least:
        yield (
            f"{model} on {board}: {BEST:.0%} of what the fullest tiles fill at {reached} batch"
            f" sizes, {least} are wanted"
        )


def complaints(batches: Sequence[int] = BATCHES) -> Iterator[str]:
    """The gates that fail, a line each."""
    for model, (width, tokens) in MODELS.items():
        for board, (arch, processors) in BOARDS.items():
            full = 0
            for batch in batches:
                M, where = batch * tokens, f"{model} on {board}, batch {batch}"
                now = share(chosen, arch, processors, width, M)
                for gemm in gemms(width):
                    if (row := better(gemm, arch, M, processors)) is not None:
                        yield f"{where}: {gemm} would be better with {dict(row.blocks)}"
                if now.rate < share(by_rows, arch, processors, width, M).rate:
                    yield f"{where}: slower than with the two tiles by rows"
                least = (ONE_MI300X if board == "MI300X" else ONE)[model]
                if batch == 1 and now.filled < least:
                    yield f"{where}: filled {now.filled:.0%}, {least:.0%} are wanted"
                full += batch >= 3 and now.filled >= FULL
            count = sum(batch >= 3 for batch in batches)
            if full < MOST[model] * count:
                yield f"{model} on {board}: {full} of {count} batches from 3 on filled {FULL:.0%}"
            if batches == BATCHES:
                yield from too_few_near(model, board)


def table() -> str:
    """Markdown: filled and rate of B/16, before and now, with the fullest tiles beside."""
    text = "| ViT-B/16 | batch | filled before | now | fullest | rate before | now | fullest |\n"
    text += "|---|--:|--:|--:|--:|--:|--:|--:|\n"
    width, tokens = MODELS["B/16"]
    for board, (arch, processors) in BOARDS.items():
        for batch in SHOWN:
            found = [
                share(choice, arch, processors, width, batch * tokens)
                for choice in (by_rows, chosen, fullest)
            ]
            cells = [f"{one.filled:.0%}" for one in found] + [f"{one.rate:.0%}" for one in found]
            text += f"| {board} | {batch} | " + " | ".join(cells) + " |\n"
    return text


def others() -> str:
    """Markdown: how many batch sizes are filled well, of all models."""
    text = "| batches 3 to 256 filled by 75 % or more | " + " | ".join(BOARDS) + " |\n"
    text += "|---|" + "--:|" * len(BOARDS) + "\n"
    for model, (width, tokens) in MODELS.items():
        cells = []
        for arch, processors in BOARDS.values():
            found = [share(chosen, arch, processors, width, B * tokens).filled for B in BATCHES]
            low = [B for B, filled in zip(BATCHES, found, strict=True) if B >= 3 and filled < FULL]
            cells.append(f"{1 - len(low) / (len(BATCHES) - 2):.0%}; batch 1: {found[0]:.0%}")
        text += f"| {model} | " + " | ".join(cells) + " |\n"
    return text


def beside_fullest() -> str:
    """Markdown: at how many batch sizes the choice fills nearly what the fullest tiles fill."""
    text = f"| batches 1 to 256 with {BEST:.0%} of the fullest tiles' share | "
    text += " | ".join(BOARDS) + " |\n|---|" + "--:|" * len(BOARDS) + "\n"
    for model in MODELS:
        counts = [near(model, board) for board in BOARDS]
        cells = [f"{count / len(BATCHES):.0%} ({count})" for count in counts]
        text += f"| {model} | " + " | ".join(cells) + " |\n"
    return text


def main(arguments: list[str] | None = None) -> int:
    status = page_table.main(
        __doc__, PAGE, (BEGIN, END), lambda: f"{table()}\n{others()}\n{beside_fullest()}", arguments
    )
    wrong = list(complaints())
    print(*wrong, sep="\n")
    return int(bool(wrong) or status)


if __name__ == "__main__":
    sys.exit(main())
