"""Row statistics handed from the kernel that writes a row to the one that normalises it.

A block that writes BN columns of a row leaves their sum and their squared deviations from their own
mean: moments (parts, M, 2) fp32, parts = ceil(D / BN). The reader joins the parts (Chan's formula),
so that LayerNorm costs no pass over the row of its own, and large means cancel nothing.
"""

import triton
import triton.language as tl


@triton.jit
def store(moments, part, rows, live, y, columns, M, D, BN: tl.constexpr):
    """Leave the moments of y (BM, BN), the values as stored; `live` (BM,) are the real rows."""
    inside = columns[None, :] < D
    y = tl.where(inside, y.to(tl.float32), 0.0)
    width = tl.cast(tl.minimum(BN, D - part * BN), tl.float32)
    total = tl.sum(y, 1)
    away = tl.where(inside, y - (total / width)[:, None], 0.0)
    at = moments + (tl.cast(part, tl.int64) * M + rows) * 2
    tl.store(at, total, mask=live)
    tl.store(at + 1, tl.sum(away * away, 1), mask=live)


@triton.jit
def load(moments, rows, live, M, D, eps, PART: tl.constexpr):
    """Mean and 1 / sqrt(var + eps) of each row: (BM,), (BM,); PART is the writer's BN."""
    parts = tl.cdiv(D, PART)
    at = moments + rows.to(tl.int64) * 2
    step = tl.cast(M, tl.int64) * 2
    total = tl.zeros(rows.shape, tl.float32)
    for part in range(parts):
        total += tl.load(at + part * step, mask=live, other=0.0)
    mean = total / D
    squares = tl.zeros(rows.shape, tl.float32)
    for part in range(parts):
        width = tl.cast(tl.minimum(PART, D - part * PART), tl.float32)
        away = tl.load(at + part * step, mask=live, other=0.0) / width - mean
        squares += tl.load(at + part * step + 1, mask=live, other=0.0) + width * away * away
    return mean, tl.math.rsqrt(squares / D + eps)
