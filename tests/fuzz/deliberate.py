"""Cases that end in each outcome on purpose: a fuzzer that cannot fail is worthless."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time

import numpy
import torch

from .outcome import OK, REFUSED, Case, Damage, check_close


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(0)  # neither an answer nor a signal


def hang() -> None:
    time.sleep(3600)


def raw() -> None:
    {}["no such key"]


def silent() -> None:
    raise ValueError("")


def recursion() -> None:
    recursion()


def wrong_number() -> None:
    truth = torch.arange(1.0, 9)
    check_close(truth.where(truth != 5, 5.5), truth, truth.double(), "y")


def wrong_nan() -> None:
    truth = torch.ones(4)
    check_close(truth.log().log() * 0, truth, truth.double(), "y")


def missing_nan() -> None:
    truth = torch.full((4,), float("nan"))
    check_close(torch.ones(4), truth, truth.double(), "y")


def wrong_shape() -> None:
    check_close(torch.ones(4, 1), torch.ones(4), torch.ones(4).double(), "y")


def damage() -> None:
    raise Damage("mine.txt is gone")


def refused() -> None:
    raise ValueError("layernorm: x has shape (3,), expected (M, D)")


def too_much_memory() -> None:
    numpy.ones(2**45, dtype=numpy.uint8)


def ok() -> None:
    check_close(torch.ones(4), torch.ones(4), torch.ones(4).double(), "y")


_undermined = False


def undermine() -> None:
    global _undermined
    _undermined = True


def fall() -> None:
    if _undermined:
        os.abort()


EXPECTED = {
    crash: "crash", leave: "crash", hang: "hang", raw: "raw", silent: "raw",
    recursion: "raw", wrong_number: "wrong", wrong_nan: "wrong", missing_nan: "wrong",
    wrong_shape: "wrong", damage: "damage", refused: REFUSED, too_much_memory: REFUSED, ok: OK,
    fall: OK, undermine: OK,
}  # fmt: skip
CASES = list(EXPECTED)
NAMES = [function.__name__ for function in CASES]


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    function = CASES[int(folder.name)]  # by its number, not by chance
    return Case(function.__name__, function)
