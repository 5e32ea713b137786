"""The fuzzing campaign: many cases, a bar, a table, and a command to replay each fault."""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from .kinds import DELIBERATE, KINDS
from .outcome import FAULTS, OK, REFUSED
from .runner import Limits, Result, run_cases

CASES = 500  # a kind, unless told


def cases(text: str) -> range:
    """ "17", or "17-23": those of one process, where it takes several to do the damage."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    names = [*KINDS, *itertools.chain.from_iterable(KINDS.values()), DELIBERATE]
    parser.add_argument("--kind", action="append", choices=names, help="or one of its generators")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default 0)")
    parser.add_argument("--cases", type=int, help=f"how many of each kind (default {CASES})")
    parser.add_argument("--minutes", type=float, help="how long, instead of how many")
    parser.add_argument("--case", type=cases, metavar="N[-M]", help="only this one, or these")
    limits = Limits()
    parser.add_argument("--limit", type=float, default=limits.seconds, help="seconds for a case")
    parser.add_argument("--memory", type=float, default=limits.gigabytes, help="GB for a case")
    given = parser.parse_args()
    given.kind = given.kind or list(KINDS)
    return given


def for_seconds(numbers: Iterable[int], seconds: float) -> Iterator[int]:
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, numbers)


def campaign(given: argparse.Namespace) -> Iterator[Result]:
    for kind in given.kind:
        numbers, total = range(given.cases or CASES), given.cases or CASES
        if given.minutes:
            share = given.minutes * 60 / len(given.kind)
            numbers, total = for_seconds(itertools.count(), share), None
        if given.case:
            numbers, total = given.case, len(given.case)
        limits = Limits(given.limit, given.memory)
        yield from tqdm(run_cases(kind, given.seed, numbers, limits), kind, total, unit=" cases")


def signature(result: Result) -> tuple[str, ...]:
    """What faults of one cause have in common: the outcome, the error's kind, the code's place."""
    places = re.findall(r'File ".*?([\w/.-]+)", line (\d+)', result.detail)
    place = [f"{file}:{line}" for file, line in places if "/vitkern/" in file]
    error = re.sub(r"\d+", "0", result.detail.partition("\n")[0])
    return result.outcome, error[:60], *(place or re.split("[(:;]", result.about)[:1])


def described(result: Result) -> str:
    """A fault for people, its replay command last."""
    lines = [f"{result.outcome.upper()}: {FAULTS[result.outcome]}", f"  {result.about}"]
    lines += [f"    {line}" for line in result.detail.splitlines()]
    return "\n".join([*lines, f"  again: {result.replay}", ""])


def table(counts: collections.Counter, kinds: list[str]) -> str:
    """How many cases of each kind ended how."""
    outcomes = [OK, REFUSED, *FAULTS]
    lines = ["".join(f"{name:>10}" for name in ["kind", *outcomes])]
    for kind in kinds:
        numbers = [counts[kind, outcome] for outcome in outcomes]
        lines.append(f"{kind:>10}" + "".join(f"{number:>10}" for number in numbers))
    return "\n".join(lines)


def main() -> int:
    given = arguments()
    counts: collections.Counter = collections.Counter()
    faults: dict[tuple, list[Result]] = {}
    try:
        for result in campaign(given):
            counts[result.kind, result.outcome] += 1
            if given.case:
                print(f"{result.outcome}: {result.about}\n    {result.detail}".rstrip())
            if result.outcome in FAULTS:
                alike = faults.setdefault(signature(result), [])
                alike.append(result)
                if len(alike) == 1:
                    with tqdm.external_write_mode():
                        print(described(result), flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(table(counts, given.kind))
    for alike in faults.values():
        more = f"  (and {len(alike) - 1} like it)" if len(alike) > 1 else ""
        print(f"{alike[0].outcome:>10}  {alike[0].replay}{more}")
    print(f"{len(faults)} different faults in {counts.total()} cases, seed {given.seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
