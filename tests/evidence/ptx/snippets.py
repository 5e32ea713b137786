"""A few lines of PTX as a kernel: what the emulator's own tests are written in."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .executor import run_ptx

_MODULE = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel({params})
{{
  .reg .pred %p<20>;
  .reg .b16 %h<20>;
  .reg .b32 %r<60>;
  .reg .b64 %rd<60>;
  mov.u32 %r0, %tid.x;
  mov.b32 %r59, smem;
{loads}{body}
  ret;
}}
"""


def run(body, *params, threads=32, grid=(1,), shared=0, **more) -> Counter[str]:
    """Runs `body`: %r0 is the thread, %r59 the shared memory, %rd0 ... the parameters.

    Returns the instructions that were executed, as run_ptx does.
    """
    names = [f".param .u64 p{n}" for n in range(len(params))]
    loads = "".join(f"  ld.param.b64 %rd{n}, [p{n}];\n" for n in range(len(params)))
    text = _MODULE.format(params=", ".join(names), loads=loads, body=body)
    return run_ptx(text, "kernel", grid, threads, shared, list(params), **more)


_REGISTERS = {2: "%h", 4: "%r", 8: "%rd"}


def apply(op: str, dtype: object, *inputs: np.ndarray, tail: str = "") -> np.ndarray:
    """The result of `op d, inputs..., tail`, one thread per element (at most 1024)."""
    count = len(inputs[0])
    threads = -(-count // 32) * 32
    inputs = [np.resize(np.ascontiguousarray(x), threads) for x in inputs]
    result = np.zeros(threads, dtype)
    names, body = [], ""
    for n, x in enumerate(inputs, 1):
        names.append(f"{_REGISTERS[x.itemsize]}{n + 10}")
        body += f"  mad.wide.u32 %rd50, %r0, {x.itemsize}, %rd{n};\n"
        body += f"  ld.global.b{8 * x.itemsize} {names[-1]}, [%rd50];\n"
    d = f"{_REGISTERS[result.itemsize]}10"
    body += f"  {op} {', '.join([d, *names])}{tail};\n"
    body += f"  mad.wide.u32 %rd50, %r0, {result.itemsize}, %rd0;\n"
    body += f"  st.global.b{8 * result.itemsize} [%rd50], {d};\n"
    run(body, result, *inputs, threads=threads)
    return result[:count]


def each(body: str, *sources: np.ndarray, **more) -> np.ndarray:
    """One word per thread: `body` makes %r9 of %r1, %r2 ..., its words of each source."""
    result = np.zeros(len(sources[0]), np.uint32)
    loads = "  mul.wide.u32 %rd50, %r0, 4;\n"
    for n in range(1, len(sources) + 1):
        loads += f"  add.s64 %rd51, %rd50, %rd{n};\n  ld.global.b32 %r{n}, [%rd51];\n"
    store = "\n  add.s64 %rd51, %rd50, %rd0;\n  st.global.b32 [%rd51], %r9;\n"
    words = [np.ascontiguousarray(x) for x in sources]
    run(loads + body + store, result, *words, threads=len(result), **more)
    return result
