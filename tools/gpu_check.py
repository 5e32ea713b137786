"""Builds every GPU kernel for every architecture, applies the gates, writes docs/gpu.md's table.

    python tools/gpu_check.py              # everything: half an hour on two cores, once
    python tools/gpu_check.py --shown      # only the kernels of the table
    python tools/gpu_check.py --check      # the same, writing no page: status 1 if it is old

Kernels that did not change come from Triton's cache. Status 1 if a kernel does not compile or
breaks a gate. The full table goes to build/gpu/machine_code.md, the binaries beside it.
"""

from __future__ import annotations

import argparse
import pathlib
import re

from vitkern.cli import aot as command
from vitkern.engines import trace as aot_list
from vitkern.engines.trace import Case
from vitkern.gpu.aot.build import Checked, Result
from vitkern.gpu.configs import ARCHS
from vitkern.gpu.launch import Variant

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / "build" / "gpu"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- machine-code table -->", "<!-- end -->"

# What the page shows, of it the kernels with products: one model in bf16, inference and training,
# and its inference in full fp32.
SHOWN = (
    Case("B/16", "bf16", 64),
    Case("B/16", "bf16", 64, training=True),
    Case("B/16", "fp32", 64),
)
HEAD = """\
| kernel | architecture | registers | spills: loop / all | shared memory | blocks per SM \
| tensor instructions per trip | static ceiling | bound by | bytes per clock from L2 |
|---|---|--:|--:|--:|---|--:|--:|---|--:|
"""


def table(rows: list[Checked]) -> str:
    """Markdown, kernel by kernel, the architectures of one under each other."""
    named = [(label(row, rows), row) for row in rows]
    first = {name: i for i, (name, _) in reversed(list(enumerate(named)))}
    named.sort(key=lambda pair: (first[pair[0]], ARCHS.index(pair[1].report.arch)))
    return HEAD + "".join(line(name, row) for name, row in named)


def label(row: Checked, rows: list[Checked]) -> str:
    """Its label, with the tensors that other variants of the kernel do without."""
    others = {name for r in rows if r.report.kernel == row.report.kernel for name in r.absent}
    present = sorted(others - set(row.absent))
    return row.label + (f", with {', '.join(present)}" if present else "")


def line(name: str, row: Checked) -> str:
    r = row.report
    ceiling = "–" if r.ceiling is None else f"{r.ceiling:.0%}"
    feed = f"{r.feed:.0f}" if r.feed else "–"
    cells = (
        name, r.arch, r.registers, f"{r.spills[0]} / {r.spills[1]}",
        f"{r.shared / 1024:.1f} KiB", f"{r.occupancy.blocks} ({r.occupancy.limiter})",
        r.tensor[0] or "–", ceiling, r.bound or "–", feed,
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |\n"


def page_with(rows: list[Checked]) -> str:
    """docs/gpu.md with its table replaced; a heading and the table if there is no page."""
    text = PAGE.read_text() if PAGE.is_file() else f"# GPU kernels\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text.split(BEGIN, 1)[1]:
        raise ValueError(f"{PAGE} has no {BEGIN} ... {END} for the table")
    inside = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    return inside.sub(lambda _: f"{BEGIN}\n{table(rows)}{END}", text, count=1)


def shown() -> dict[str, list[Variant]]:
    """Kernels of the page's table, by architecture."""
    found = {}
    for arch in ARCHS:
        launched = [one.variant for case in SHOWN for one in aot_list.launches(case, arch)]
        found[arch] = list({variant.name: variant for variant in launched}.values())
    return found


def complaints(result: Result) -> list[str]:
    """What is wrong, a line each."""
    found = [f"FAILED {one.arch} {one.id}: {one.reason}" for one in result.failures]
    for one in result.checked:
        found += [f"GATE {one.report.arch} {one.label}: {rule}" for rule in one.broken]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shown", action="store_true", help="only the kernels of the table")
    parser.add_argument("--check", action="store_true", help="--shown, and write no page")
    parser.add_argument("--jobs", type=command.jobs, metavar="N", help="processes at once")
    given = parser.parse_args()
    command.require_triton()
    table_of, few = shown(), given.shown or given.check
    everything = table_of if few else {arch: aot_list.variants(arch) for arch in ARCHS}
    result = command.build(everything, OUT, given.jobs, check=True)
    wrong = complaints(result)
    ids = {(variant.name, arch) for arch, several in table_of.items() for variant in several}
    rows = [one for one in result.checked if (one.id, one.report.arch) in ids]
    rows = [one for one in rows if one.report.asked.dots]
    if not few:
        (OUT / "machine_code.md").write_text(table(result.checked))
    page = page_with(rows)
    if not given.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        wrong.append(f"{PAGE.name}'s table is old: run python tools/gpu_check.py --shown")
    print(*wrong, command.summary(result), sep="\n")
    print(f"{len(result.checked)} kernels analysed, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
