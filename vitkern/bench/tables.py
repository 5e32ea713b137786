"""Tables of vitkern and its peers: rows of results files in, Markdown or a few lines out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .cases import NAMES, PEERS, Case, allowed_error
from .rows import is_of

NOTES = (
    "Median milliseconds, the same weights and images for all; each contestant in a process of its"
    " own, taking turns. A peer's cell is its fastest precision (named where it is another one)"
    " whose error against float64 is in the class of the row's; the speed-up is over the fastest"
    " of them."
)


def cases(rows: Iterable[dict]) -> list[Case]:
    found = [
        Case(row["name"], row["axes"]["B"], row["axes"]["Y"])
        for row in rows
        if row["kind"] == "peer"
    ]
    return list(dict.fromkeys(found))


def rivals(these: Iterable[dict], precision: str) -> dict[str, dict]:
    """Of each peer the fastest row whose error is in the class of a precision."""
    best: dict[str, dict] = {}
    for row in these:
        if row["provider"] in PEERS and row.get("error", 1e9) <= allowed_error(precision):
            old = best.get(row["provider"])
            best[row["provider"]] = row if old is None or row["us"] < old["us"] else old
    return best


def ours(these: Iterable[dict]) -> list[dict]:
    """vitkern's rows that have a time."""
    return [row for row in these if row.get("provider") == "native" and "us" in row]


def speed_up(these: Sequence[dict], row: dict) -> float | None:
    """Of a row of vitkern over the fastest rival."""
    times = [rival["us"] for rival in rivals(these, row["precision"]).values()]
    return min(times) / row["us"] if times else None


def too_coarse(rows: Iterable[dict]) -> list[str]:
    """vitkern's rows whose error is not in the class of their own precision."""
    return [
        f"vitkern {row['precision']}, {row['name']} batch {row['axes']['B']}: its error is"
        f" {row['error']:.1e}, more than {allowed_error(row['precision']):.1e}"
        for row in ours(rows)
        if not row["error"] <= allowed_error(row["precision"])
    ]


def comparison(rows: list[dict]) -> list[str]:
    """A line for each case and precision of vitkern: every peer's best beside it."""
    found = [
        f"| model | batch | image | precision | {' | '.join(NAMES.values())} | speed-up |",
        f"|---|--:|--:|---|{'--:|' * len(NAMES)}--:|",
    ]
    for case in cases(rows):
        these = [row for row in rows if is_of(row, case)]
        for row in ours(these):
            rival, gain = rivals(these, row["precision"]), speed_up(these, row)
            cells = [_cell(rival.get(name), row["precision"]) for name in PEERS]
            found.append(
                f"| {case.name} | {case.batch} | {case.size} | {row['precision']}"
                f" | {' | '.join(cells)} | {_ms(row)} |"
                f" {f'**{gain:.2f}×**' if gain else '–'} |"
            )
    return found


def _ms(row: dict) -> str:
    return f"{row['us'] / 1e3:.1f} ms" if row["us"] < 1e5 else f"{row['us'] / 1e3:.0f} ms"


def _cell(row: dict | None, precision: str) -> str:
    if row is None:
        return "–"
    return _ms(row) if row["precision"] == precision else f"{_ms(row)} ({row['precision']})"


def details(rows: list[dict]) -> list[str]:
    """A line for each contestant of each case: time, spread, error, memory; or why not."""
    found = [
        "| model | batch | image | who | precision | median | p20-p80 | error | resident |",
        "|---|--:|--:|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["kind"] != "peer":
            continue
        begin = (
            f"| {row['name']} | {row['axes']['B']} | {row['axes']['Y']} | {NAMES[row['provider']]}"
            f" | {row['precision']} |"
        )
        if "us" in row:
            spread = f"{row['us_p20'] / 1e3:.1f}-{row['us_p80'] / 1e3:.1f}"
            memory = f"{row['resident_bytes'] / 2**20:.0f} MiB"
            found.append(f"{begin} {_ms(row)} | {spread} | {row['error']:.1e} | {memory} |")
        else:
            found.append(f"{begin} {_plain(row['why'])} | – | – | – |")
    return found


def _plain(text: str) -> str:
    """Words of a library in a cell of a table."""
    return text.replace("|", "/").replace("<", "(").replace(">", ")").replace("\n", " ")


def operators(rows: list[dict]) -> str:
    """Where a forward of vitkern's goes: time, rate and share of the machine's rate by step."""
    found = [
        "| model | batch | image | precision | step | time | GFLOPS | of the multiply rate |",
        "|---|--:|--:|---|---|--:|--:|--:|",
    ]
    for row in ours(rows):
        begin = f"| {row['name']} | {row['axes']['B']} | {row['axes']['Y']} | {row['precision']} |"
        total = sum(step["us"] for step in row["steps"].values())
        for name, step in row["steps"].items():
            share = f"{step['us'] / 1e3:.2f} ms ({step['us'] / total:.0%})"
            found.append(
                f"{begin} {name} | {share} | {step['gflops']:.0f} | {step['of_rate']:.0%} |"
            )
        whole = row["gflops"] / row["multiply_gflops"]
        found.append(f"{begin} **all** | {_ms(row)} | {row['gflops']:.0f} | **{whole:.0%}** |")
    return "\n".join(found)


def lines(rows: list[dict], case: Case) -> list[str]:
    """A case in a few lines of a terminal, as soon as it is measured."""
    these = [row for row in rows if is_of(row, case)]
    found = []
    for row in these:
        who = f"{case.text}: {NAMES[row['provider']]} {row['precision']}"
        if "us" not in row:
            found.append(f"{who}: {row['why']}")
            continue
        found.append(f"{who}: {_ms(row)}, error {row['error']:.1e}")
        if row["provider"] == "native":
            gain = speed_up(these, row)
            rate = row["gflops"] / row["multiply_gflops"]
            found[-1] += f", {rate:.0%} of the multiply rate"
            found[-1] += f", {gain:.2f}x the best peer" if gain else ""
    return found
