"""What the PTX emulator counts: instructions by class, once for each warp that executes them."""

import numpy as np
import pytest

pytest.importorskip("triton")
from tests.evidence.ptx.snippets import run


def test_counts_what_each_warp_executes():
    """Three warps: all copy, those behind the first loop twice over a load of a matrix."""
    body = """
      and.b32 %r1, %r0, 31; shl.b32 %r1, %r1, 2; add.s32 %r5, %r59, %r1;
      setp.lt.u32 %p1, %r0, 32; mov.b32 %r2, 0;
      cvt.u64.u32 %rd9, %r1; add.s64 %rd9, %rd9, %rd0;
      @!%p1 cp.async.ca.shared.global [%r5], [%rd9], 4;
      cp.async.wait_all; bar.sync 0;
      @%p1 bra END;
    LOOP:
      and.b32 %r6, %r0, 7; shl.b32 %r6, %r6, 4; add.s32 %r6, %r59, %r6;
      ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r6];
      add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 2;
      @%p2 bra LOOP;
    END:
    """
    source = np.arange(32, dtype=np.uint32)
    executed = run(body, source, threads=96, grid=(2,), shared=128)
    assert executed == {"cp.async": 2 * 2, "ldmatrix": 2 * 2 * 2}
