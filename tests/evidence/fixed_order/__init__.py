"""Matrix products and PyTorch arithmetic that give the same bits on every CPU: fixed_order.c.

BLAS libraries choose a kernel, and with it an order of summation, by the CPU, the batch and a row's
place in a tile. What tests compare with must not depend on that: `matmul` is the yardstick's
product, `accumulate` a tensor core's.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import pytest

_COLUMNS = 64  # fixed_order.c's kColumns


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiled anew by each process: half a second, and never another machine's code."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler")
    source = pathlib.Path(__file__).with_name("fixed_order.c")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder, "fixed_order.so")
        command = [compiler, "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
        built = subprocess.run([*command, source, "-o", library], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return ctypes.CDLL(str(library))


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (..., M, K) @ b (..., K, N) in fp32, summed as fixed_order.c says."""
    return _each(_library().multiply_add, a, b)


def accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray, step: int) -> np.ndarray:
    """c + a @ b in fp32: `step` exact products at a time join the sum with one rounding."""
    return _each(_library().accumulate_in_steps, a, b, c, step)


def _each(function, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, *sizes: int):
    """One call of the C function for each matrix of a batch, columns padded to a multiple."""
    *batch, M, K = a.shape
    N, count = b.shape[-1], math.prod(batch)
    padded = -N % _COLUMNS + N
    a = np.ascontiguousarray(a, np.float32).reshape(count, M, K)
    right = np.zeros((*b.shape[:-1], padded), np.float32)
    right[..., :N] = b
    right = right.reshape(count, K, padded)
    out = np.zeros((count, M, padded), np.float32)
    if c is not None:
        out[..., :N] = c.reshape(count, M, N)
    for index in range(count):
        pointers = (ctypes.c_void_p(x[index].ctypes.data) for x in (out, a, right))
        function(*pointers, *map(ctypes.c_ssize_t, (M, padded, K, *sizes)))
    return out[..., :N].reshape(*batch, M, N)
