"""Fuzzers: seeded odd input for every surface of vitkern, run where a crash can be survived.

    python -m tests.fuzz --minutes 10 --seed 7        # make fuzz
    python -m tests.fuzz --kind api --seed 7 --case 1234   # one case again

A *kind* is a surface (kinds.py). Its generators turn a seeded random.Random into a `Case`: a
description and a function to call. worker.py calls it in a process of its own, runner.py watches
that process, outcome.py says what came of it.
"""

import os
import pathlib
import sys

# As in conftest.py, before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# tiny_models and fake_cuda: pytest finds them by itself, `python -m tests.fuzz` does not.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
