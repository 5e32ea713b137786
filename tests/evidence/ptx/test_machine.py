"""The PTX emulator's warps, matrices, memory and control flow, and the alarms that it raises."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.ptx import PtxError
from tests.evidence.ptx.snippets import each, run

LANES = np.arange(32, dtype=np.uint32)


# ---- control flow ------------------------------------------------------------------------------


def collatz(n):
    steps = 0
    while n != 1:
        n = 3 * n + 1 if n & 1 else n // 2
        steps += 1
        if steps == 40:
            break
    return steps


COLLATZ = """
  mov.b32 %r9, 0;
$LOOP:
  setp.eq.u32 %p1, %r1, 1;
  @%p1 bra $DONE;
  and.b32 %r3, %r1, 1;
  setp.eq.u32 %p2, %r3, 0;
  @!%p2 bra $ODD;
  shr.u32 %r1, %r1, 1;
  bra.uni $NEXT;
$ODD:
  mad.lo.u32 %r1, %r1, 3, 1;
$NEXT:
  add.u32 %r9, %r9, 1;
  setp.lt.u32 %p3, %r9, 40;
  @%p3 bra $LOOP;
$DONE:
"""


def test_threads_part_in_loops_and_meet_again():
    n = np.arange(1, 257, dtype=np.uint32)
    assert each(COLLATZ, n).tolist() == [collatz(int(x)) for x in n]


def test_they_meet_before_anything_runs_twice():
    """A shuffle after the branches needs the whole warp: it would complain about a part of it."""
    n = np.arange(1, 65, dtype=np.uint32)
    got = each(COLLATZ + "shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;", n)
    assert got.tolist() == [collatz(int(x)) for x in n.reshape(-1, 2)[:, ::-1].ravel()]


def test_threads_may_leave_early():
    body = "mov.b32 %r9, 7; setp.lt.u32 %p1, %r0, 10; @%p1 ret; mov.b32 %r9, 8;"
    result = np.zeros(32, np.uint32)
    store = " mad.wide.u32 %rd9, %r0, 4, %rd0; st.global.b32 [%rd9], %r9;"
    run(body + store, result)
    assert result.tolist() == [0] * 10 + [8] * 22


def test_blocks_beyond_one_wave_all_run():
    grid, threads = (5, 7, 3), 128
    result = np.zeros((*grid[::-1], threads), np.uint32)
    body = """
      mov.u32 %r1, %ctaid.z; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y;
      mad.lo.u32 %r1, %r1, %r2, %r3;
      mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
      mov.u32 %r2, %ntid.x; mad.lo.u32 %r1, %r1, %r2, %r0;
      mad.wide.u32 %rd9, %r1, 4, %rd0; add.u32 %r1, %r1, 1; st.global.b32 [%rd9], %r1;"""
    run(body, result, grid=grid, threads=threads)
    assert np.array_equal(result.ravel(), np.arange(1, result.size + 1))


def test_predicated_instructions_leave_other_threads_alone():
    body = (
        "mov.b32 %r9, 5; setp.gt.u32 %p1, %r1, 20; @%p1 mov.b32 %r9, 6; @!%p1 add.u32 %r9, %r9, 2;"
    )
    assert each(body, LANES).tolist() == [6 if n > 20 else 7 for n in range(32)]


def test_registers_of_an_inner_scope_are_its_own():
    body = "{ .reg .b32 t; mov.b32 t, 3; { .reg .b32 t; mov.b32 t, 4; } add.u32 %r9, t, %r1; }"
    assert each(body, LANES).tolist() == [n + 3 for n in range(32)]


# ---- warps -------------------------------------------------------------------------------------


def shuffled(mode, a, b, c):
    """(value, whether it came from a lane of the segment), by the manual's rules for one warp."""
    found = []
    for lane in range(32):
        mask = c >> 8 & 31
        highest = (lane & mask) | (c & 31 & ~mask)
        lowest = lane & mask
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~mask)}[mode]
        fine = j >= highest if mode == "up" else j <= highest
        found.append((a[j] if fine else a[lane], int(fine)))
    return found


@pytest.mark.parametrize("mode", ("up", "down", "bfly", "idx"))
@pytest.mark.parametrize("width", (32, 8))
@pytest.mark.parametrize("by", (1, 5, 16))
def test_shuffles(mode, width, by):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    a = LANES * 3 + 1
    body = f"shfl.sync.{mode}.b32 %r9|%p1, %r1, {by}, {c}, -1;"
    want = shuffled(mode, a.tolist(), by, c)
    assert each(body, a).tolist() == [value for value, _ in want]
    fine = each(body + " selp.b32 %r9, 1, 0, %p1;", a)
    assert fine.tolist() == [valid for _, valid in want]


def test_a_warp_votes_and_adds():
    body = "setp.gt.u32 %p1, %r1, 5; vote.sync.ballot.b32 %r9, %p1, -1;"
    assert set(each(body, LANES).tolist()) == {0xFFFFFFC0}
    assert set(each("redux.sync.add.s32 %r9, %r1, -1;", LANES).tolist()) == {496}


def test_a_part_of_a_warp_may_not_shuffle():
    body = "mov.b32 %r9, 0; setp.lt.u32 %p1, %r0, 8; @%p1 bra $END;"
    with pytest.raises(PtxError, match="have parted"):
        each(body + " shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;\n$END:", LANES)


# ---- matrices ----------------------------------------------------------------------------------


def a_element(i, lane, per):
    """(row, column) of element i of A in a lane; `per` numbers in a register."""
    group, thread = lane >> 2, lane & 3
    register, part = divmod(i, per)
    return group + 8 * (register % 2), (thread + 4 * (register // 2)) * per + part


def b_element(i, lane, per):
    register, part = divmod(i, per)
    return ((lane & 3) + 4 * register) * per + part, lane >> 2


def c_element(i, lane):
    return (lane >> 2) + 8 * (i // 2), (lane & 3) * 2 + i % 2


KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}


@pytest.mark.parametrize(
    "kind, k", [("bf16", 16), ("f16", 16), ("bf16", 8), ("f16", 8), ("tf32", 8), ("tf32", 4)]
)
def test_matrix_product(kind, k):
    """Two warps with matrices of their own, fragments as the manual draws them."""
    g = torch.Generator().manual_seed(k)
    a, b = torch.randn(2, 16, k, generator=g), torch.randn(2, k, 8, generator=g)
    c = torch.randn(2, 16, 8, generator=g)
    a, b = a.to(KINDS[kind]), b.to(KINDS[kind])
    if kind == "tf32":  # the hardware ignores the last 13 bits
        exact = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    else:
        exact = [a, b]
    per = 4 // a.element_size()
    na, nb = 16 * k // 32, 8 * k // 32
    places = [[a_element(i, lane, per) for i in range(na)] for lane in range(32)]
    fa = torch.stack([torch.stack([a[w][p] for p in row]) for w in range(2) for row in places])
    places = [[b_element(i, lane, per) for i in range(nb)] for lane in range(32)]
    fb = torch.stack([torch.stack([b[w][p] for p in row]) for w in range(2) for row in places])
    places = [[c_element(i, lane) for i in range(4)] for lane in range(32)]
    fc = torch.stack([torch.stack([c[w][p] for p in row]) for w in range(2) for row in places])
    ra, rb = na // per, nb // per
    out = torch.zeros(64, 4)
    load = [
        f"mad.wide.u32 %rd9, %r0, {4 * n}, %rd{p};\n"
        + "".join(f"ld.global.b32 %r{10 * p + i}, [%rd9+{4 * i}];\n" for i in range(n))
        for p, n in ((1, ra), (2, rb), (3, 4))
    ]

    def registers(p, n):
        return "{" + ", ".join(f"%r{10 * p + i}" for i in range(n)) + "}"

    accumulator = registers(3, 4)
    body = "".join(load) + (
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {accumulator},"
        f" {registers(1, ra)}, {registers(2, rb)}, {accumulator};\n"
        f"mad.wide.u32 %rd9, %r0, 16, %rd0;\nst.global.v4.b32 [%rd9], {accumulator};"
    )
    run(body, out, fa, fb, fc, threads=64)
    truth = torch.matmul(exact[0].double(), exact[1].double()) + c
    for w in range(2):
        for lane, i in ((lane, i) for lane in range(32) for i in range(4)):
            assert out[32 * w + lane, i] == truth[w][c_element(i, lane)].float()


@pytest.mark.parametrize("count", (1, 2, 4))
@pytest.mark.parametrize("transposed", (False, True))
def test_loads_matrices(count, transposed):
    rng = np.random.default_rng(count)
    tiles = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    result = np.zeros((32, count), np.uint32)
    outs = ", ".join(f"%r{20 + n}" for n in range(count))
    trans = ".trans" if transposed else ""
    stores = "".join(f"st.global.b32 [%rd9+{4 * n}], %r{20 + n};\n" for n in range(count))
    body = f"""
      mad.wide.u32 %rd9, %r0, 16, %rd1; ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd9];
      xor.b32 %r5, %r0, 21; shl.b32 %r5, %r5, 4; add.u32 %r5, %r5, %r59;
      st.shared.v4.b32 [%r5], {{%r1, %r2, %r3, %r4}};
      bar.sync 0;
      ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{outs}}}, [%r5];
      mad.wide.u32 %rd9, %r0, {4 * count}, %rd0; {stores}"""
    run(body, result, tiles, shared=512)  # row n of all tiles lies at 16 (n xor 21)
    for lane in range(32):
        for n in range(count):
            row, column = lane // 4, lane % 4 * 2
            tile = tiles[n].T if transposed else tiles[n]
            assert result[lane, n] == int(tile[row, column]) | int(tile[row, column + 1]) << 16


@pytest.mark.parametrize("transposed", (False, True))
def test_stores_matrices_where_loads_find_them(transposed):
    """stmatrix, then ldmatrix: the same words, or those of the transposed matrices."""
    trans, words = ".trans" if transposed else "", np.arange(64, dtype=np.uint32).reshape(32, 2)
    words = words * 65537 + 65536  # two numbers each: 2 n + 1, 2 n
    result = np.zeros_like(words)
    body = f"""
      mad.wide.u32 %rd9, %r0, 8, %rd1; ld.global.v2.b32 {{%r1, %r2}}, [%rd9];
      shl.b32 %r5, %r0, 4; add.u32 %r5, %r5, %r59;
      stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r5], {{%r1, %r2}};
      ldmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 {{%r3, %r4}}, [%r5];
      mad.wide.u32 %rd9, %r0, 8, %rd0; st.global.v2.b32 [%rd9], {{%r3, %r4}};"""
    run(body, result, words, shared=512)
    for n in range(2):
        before, after = (
            np.ascontiguousarray(x[:, n]).view(np.uint16).reshape(8, 8) for x in (words, result)
        )
        assert np.array_equal(after, before.T if transposed else before)


# ---- shared memory and cp.async ----------------------------------------------------------------

SHARED = "shl.b32 %r5, %r0, 2; add.u32 %r5, %r5, %r59; xor.b32 %r6, %r5, 128;"  # own, other warp's


def test_a_barrier_hands_over():
    body = SHARED + "st.shared.b32 [%r5], %r1; bar.sync 0; ld.shared.b32 %r9, [%r6];"
    n = np.arange(64, dtype=np.uint32)
    assert each(body, n, shared=256).tolist() == (n ^ 32).tolist()


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("ld.shared.b32 %r9, [%r5];", "nobody wrote"),
        ("st.shared.b32 [%r5], %r1; ld.shared.b32 %r9, [%r6];", "another warp just wrote"),
        (
            "st.shared.b32 [%r5], %r1; bar.sync 0; ld.shared.b32 %r9, [%r6];"
            "st.shared.b32 [%r5], %r9;",
            "another warp just read",
        ),
        (  # both warps read one word, the last of them writes it
            "st.shared.b32 [%r5], %r1; bar.sync 0; ld.shared.b32 %r9, [%r59];"
            "setp.ge.u32 %p1, %r0, 32; @%p1 st.shared.b32 [%r59], %r9;",
            "another warp just read",
        ),
        ("st.shared.b32 [%r5+252], %r1;", "of 256 bytes"),
        ("st.shared.v2.b32 [%r5+4], {%r1, %r1};", "no multiple of 8"),
        ("st.shared.b32 [%r59], %r0;", "two threads write different numbers"),
        ("setp.lt.u32 %p1, %r0, 40; @%p1 bra $E; bar.sync 0;\n$E:", "others never come"),
        ("frobnicate.b32 %r9, %r1;", "unknown instruction, line .*frobnicate"),
        ("add.sat.s32 %r9, %r1, %r1;", "unknown form of add"),
        ("ld.local.b32 %r9, [%rd0];", "unknown form of ld"),
        ("div.u32 %r9, %r1, 0;", "division by zero"),
        ("$L: bra $L;", "does not end"),
    ],
)
def test_alarms(body, complaint, monkeypatch):
    monkeypatch.setattr("tests.evidence.ptx.machine.ENDLESS", 1000)
    with pytest.raises(PtxError, match=complaint):
        each(SHARED + body, np.arange(64, dtype=np.uint32), shared=256)


COPY = SHARED + "add.s64 %rd9, %rd50, %rd1; cp.async.ca.shared.global [%r5], [%rd9], 4{size};"


@pytest.mark.parametrize(
    "wait, complaint",
    [
        ("cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;", ""),
        ("cp.async.wait_all; bar.sync 0;", ""),
        ("cp.async.commit_group; cp.async.wait_group 0;", "another warp just wrote"),
        ("cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;", "has yet to write"),
        ("cp.async.wait_group 0; bar.sync 0;", "has yet to write"),
        ("cp.async.commit_group; bar.sync 0;", "has yet to write"),
        (
            "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;",
            "",
        ),
    ],
)
def test_copies_arrive_with_their_wait(wait, complaint):
    n = np.arange(64, dtype=np.uint32)
    body = COPY.format(size="") + wait + "ld.shared.b32 %r9, [%r6];"
    if complaint:
        with pytest.raises(PtxError, match=complaint):
            each(body, n, shared=256)
    else:
        assert each(body, n, shared=256).tolist() == (n ^ 32).tolist()


def test_copies_fill_up_with_zeros():
    """Only the first bytes are read: the others may lie outside every buffer."""
    n = np.arange(32, dtype=np.uint32) + 0x01020304
    body = "and.b32 %r7, %r0, 3; mul.wide.u32 %rd8, %r7, 4096;"  # lanes of size 0 point nowhere
    body += SHARED + "add.s64 %rd9, %rd50, %rd1; setp.eq.u32 %p1, %r7, 0;"
    body += "@%p1 add.s64 %rd9, %rd9, 1048576; cp.async.ca.shared.global [%r5], [%rd9], 4, %r7;"
    body += "cp.async.wait_all; ld.shared.b32 %r9, [%r5];"
    want = [int(x) & (256 ** (lane % 4) - 1) for lane, x in enumerate(n)]
    assert each(body, n, shared=128).tolist() == want


# ---- global memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("ld.global.b32 %r9, [%rd1+128];", r"reads 4 bytes at byte 128 of parameter 1 \(of 128\)"),
        ("ld.global.b32 %r9, [%rd1+-4];", "reads 4 bytes at byte -4 of parameter 1"),
        ("ld.global.b32 %r9, [%rd1+2];", "no multiple of 4"),
        ("ld.global.v4.b32 {%r9, %r8, %r7, %r6}, [%rd51];", "no multiple of 16"),
        ("mov.b64 %rd9, 0; ld.global.b32 %r9, [%rd9];", "reads 4 bytes at 0x0"),
        ("st.global.b32 [%rd1], %r1;", "not to be written"),
        ("st.global.b32 [%rd0], %r0;", "another thread writes otherwise"),
    ],
)
def test_global_alarms(body, complaint):
    with pytest.raises(PtxError, match=complaint):
        each(body, LANES, writes=frozenset({"parameter 0"}))


def test_gaps_between_rows_are_not_the_tensors():
    x = torch.arange(64, dtype=torch.float32).reshape(8, 8)[:, :4]
    result = torch.zeros(1)
    run("ld.global.b32 %r9, [%rd1+44]; st.global.b32 [%rd0], %r9;", result, x)
    assert result.item() == 11
    with pytest.raises(PtxError, match="byte 48 of parameter 1"):
        run("ld.global.b32 %r9, [%rd1+48];", result, x)
    with pytest.raises(PtxError, match="byte 8 of parameter 1"):  # half of it is
        run("ld.global.v2.b32 {%r8, %r9}, [%rd1+8];", result, x[:, :3])


@pytest.mark.parametrize(
    "body",
    [
        "st.global.b32 [%rd0], %r2;",  # all blocks to one place, each its own number
        "st.global.b32 [%rd9], %r2; ld.global.b32 %r3, [%rd8];",
        "ld.global.b32 %r3, [%rd8]; st.global.b32 [%rd9], %r2;",
        # all read one place, the last block writes it
        "ld.global.b32 %r3, [%rd0]; setp.eq.u32 %p2, %r2, 3; @%p2 st.global.b32 [%rd0], %r2;",
    ],
)
@pytest.mark.parametrize("threads", (32, 1024), ids=("together", "one-after-the-other"))
def test_blocks_have_no_order(body, threads):
    x = np.zeros(4, np.uint32)
    one = "mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r0, 0; @%p1 ret;"
    one += "mad.wide.u32 %rd9, %r2, 4, %rd0; xor.b32 %r4, %r2, 3; mad.wide.u32 %rd8, %r4, 4, %rd0;"
    with pytest.raises(PtxError, match="no order"):
        run(one + body, x, grid=(4,), threads=threads)
    run(one + "ld.global.b32 %r3, [%rd9]; st.global.b32 [%rd9], %r2;", x, grid=(4,))  # its own
    assert x.tolist() == [0, 1, 2, 3]


def test_errors_name_thread_and_line():
    with pytest.raises(PtxError, match=r"(?s)thread 5 of block \(2, 0, 0\).*at line \d+: @%p1 ld"):
        body = "mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r0, 5; setp.eq.and.u32 %p1, %r2, 2, %p1;"
        run(body + "@%p1 ld.global.b32 %r3, [%rd0+4];", np.zeros(1, np.uint32), grid=(3,))
