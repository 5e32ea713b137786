"""The process that runs cases: one JSON line in for each, two out (it begins, it ended).

python -m tests.fuzz.worker MEMORY_GB SCRATCH_FOLDER

It may die or hang at any moment: runner.py watches it. What a case prints goes to stderr, which
runner.py keeps for the report.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pathlib
import resource
import shutil
import sys
import traceback

import torch

from vitkern import _C, ops  # noqa: F401  (their memory is not a case's)

from . import kinds, outcome


def limit_memory(gigabytes: float) -> None:
    """An absurd allocation is then a MemoryError here, not the end of the machine."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()  # address space, most of it libraries
    most = now + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(kind: str, seed: int, index: int, scratch: pathlib.Path, say) -> None:
    folder = scratch / str(index)
    about = "(the generator itself)"
    try:
        case = kinds.make(kind, seed, index, folder)
        about = case.about
        say(begin=index, about=about)
        ended, detail = case.run() or outcome.OK, ""
    except Exception as error:
        ended = outcome.judge(error)
        detail = f"{type(error).__name__}: {error}"
        if ended in outcome.FAULTS and ended != "wrong":
            detail += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
        del error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(end=index, outcome=ended, detail=detail[:4000], about=about)


def main() -> None:
    gigabytes, scratch = float(sys.argv[1]), pathlib.Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()

    def say(**answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    torch.set_num_threads(2)
    limit_memory(gigabytes)
    say(ready=os.getpid())
    for count, line in enumerate(sys.stdin):
        kind, seed, index = json.loads(line)
        run(kind, seed, index, scratch, say)
        if count % 64 == 63:
            gc.collect()


if __name__ == "__main__":
    main()
