"""wgmma in the PTX emulator: where matrices lie, and the alarms about what is still under way."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.ptx import PtxError
from tests.evidence.ptx.snippets import run

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}
MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # bytes of a row of the swizzle's pattern -> descriptor
B_AT, END = 16384, 49152  # A lies before, B after it


def address(row, k, size, width, transposed):
    """Of an element, in a matrix whose patterns of 8 rows of `width` bytes lie close together.

    By rows of k, patterns follow each other along the rows; transposed (rows contiguous) first
    along k, so that the leading offset is two patterns. Without swizzle a pattern is 8 rows of 16
    bytes, and they follow each other along k first.
    """
    across, along = (row * size, k) if transposed else (k * size, row)
    if transposed:
        pattern = 2 * (across // width) + along // 8
    else:
        pattern = along // 8 if width > 16 else 2 * (along // 8) + across // 16
    inside = along % 8 * width + across % width
    chunk, rest = inside // 16, inside % 16
    chunk = chunk ^ chunk // 8 % (width // 16)  # rows of 128 bytes are counted, whatever the width
    return pattern * 8 * width + 16 * chunk + rest


def descriptor(at, width, transposed, base=0):
    atom = 8 * width
    if width == 16:
        leading, stride = atom, 2 * atom
    else:
        leading, stride = (2 * atom, atom) if transposed else (0, atom)
    word = at >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | MODES[width] << 62
    return f"0x{word:x}"


def place(image, at, matrix, width, transposed):
    size = matrix.element_size()
    to = at + address(*np.indices(matrix.shape), size, width, transposed)
    raw = matrix.contiguous().view(torch.uint8).numpy().reshape(*matrix.shape, size)
    image[to[..., None] + np.arange(size)] = raw


def copied(image):
    """Each of 128 threads takes its 16 bytes of every 2048 into shared memory."""
    body = "shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd9, %r1; add.s64 %rd9, %rd9, %rd1;"
    body += "add.u32 %r1, %r1, %r59;\n"
    for at in range(0, len(image), 2048):
        body += f"ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd9+{at}];\n"
        body += f"st.shared.v4.b32 [%r1+{at}], {{%r2, %r3, %r4, %r5}};\n"
    return body


READY = "bar.sync 0; fence.proxy.async.shared::cta; wgmma.fence.sync.aligned;\n"
DONE = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"


def registers(prefix, count):
    return "{" + ", ".join(f"{prefix}{n}" for n in range(count)) + "}"


def multiplied(kind, a, b, width=128, trans_a=False, trans_b=False, a_regs=False, base=0):
    """D (64, N) = 1 + 2 A B, as two wgmma compute it from 1."""
    columns, depth = b.shape[0], a.shape[1]
    image = np.zeros(END, np.uint8)
    place(image, 128 * base, a, width, trans_a)
    place(image, B_AT, b, width, trans_b)
    flags = [1, 1] if kind == "tf32" else [1, 1, *([] if a_regs else [int(trans_a)]), int(trans_b)]
    given = registers("a", 4) if a_regs else "%rd20"
    sums = registers("d", columns // 2)
    form = f"m64n{columns}k{depth}.f32.{kind}.{kind}"
    body = "{ .reg .b32 d<128>; .reg .b32 a<4>; .reg .pred q;\n" + copied(image)
    body += f"mov.b64 %rd20, {descriptor(128 * base, width, trans_a, base)};\n"
    body += f"mov.b64 %rd21, {descriptor(B_AT, width, trans_b)};\n"
    body += "".join(f"mov.b32 d{n}, 0f3F800000;\n" for n in range(columns // 2))
    if a_regs:  # as mma.sync has it: rows g and g + 8 of 16, columns from t and from t + 4 on
        body += "mad.wide.u32 %rd9, %r0, 16, %rd2; ld.global.v4.b32 {a0, a1, a2, a3}, [%rd9];\n"
    mma = f"wgmma.mma_async.sync.aligned.{form} {sums}, {given}, %rd21, q, "
    mma += ", ".join(map(str, flags)) + ";\n"
    body += "mov.pred q, -1;\n" + READY + mma + mma + DONE
    body += f"mul.wide.u32 %rd9, %r0, {2 * columns}; add.s64 %rd9, %rd9, %rd0;\n"
    body += "".join(f"st.global.b32 [%rd9+{4 * n}], d{n};\n" for n in range(columns // 2)) + "}"
    out, per = torch.zeros(128, columns // 2), 4 // a.element_size()
    t, n, part = np.indices((128, 4, per))
    row, k = 16 * (t // 32) + t % 32 // 4 + 8 * (n % 2), (t % 4 + 4 * (n // 2)) * per + part
    run(body, out, image, a[row, k], threads=128, shared=END)
    t, n = np.indices(out.shape)
    row, column = (
        16 * (t // 32) + t % 32 // 4 + 8 * (n // 2 % 2),
        8 * (n // 4) + 2 * (t % 4) + n % 2,
    )
    d = torch.zeros(64, columns)
    d[row, column] = out
    return d


def factors(kind, columns):
    """Small whole numbers: every sum is exact."""
    g = torch.Generator().manual_seed(columns)
    depth = 8 if kind == "tf32" else 16
    shapes = ((64, depth), (columns, depth))
    return [torch.randint(-8, 9, s, generator=g).to(KINDS[kind]) for s in shapes]


CASES = [
    (kind, columns, width, trans_a, trans_b)
    for kind in KINDS
    for columns, width in ((8, 128), (16, 64), (64, 32), (128, 16), (256, 128))
    for trans_a, trans_b in (((False, False),) if kind == "tf32" else
                             ((False, False), (False, True), (True, False), (True, True)))
    if kind != "f16" or columns == 64
]  # fmt: skip


@pytest.mark.parametrize("kind, columns, width, trans_a, trans_b", CASES)
def test_finds_matrices_in_shared_memory(kind, columns, width, trans_a, trans_b):
    a, b = factors(kind, columns)
    got = multiplied(kind, a, b, width, trans_a, trans_b)
    assert torch.equal(got, 1 + 2 * a.float() @ b.float().T)


def test_a_pattern_may_begin_in_any_row_of_128_bytes():
    a, b = factors("bf16", 16)
    assert torch.equal(multiplied("bf16", a, b, base=3), 1 + 2 * a.float() @ b.float().T)


@pytest.mark.parametrize("kind", KINDS)
def test_takes_the_left_matrix_from_registers(kind):
    a, b = factors(kind, 64)
    got = multiplied(kind, a, b, trans_b=kind != "tf32", a_regs=True)
    assert torch.equal(got, 1 + 2 * a.float() @ b.float().T)


# ---- what is forbidden while it runs -----------------------------------------------------------

MMA = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13},"
    " %rd20, %rd21, %p1, 1, 1, 0, 0;"
)
FROM_REGISTERS = MMA.replace("%rd20", "{%r14, %r15, %r16, %r17}").replace("0, 0;", "0;")
STEPS = {
    "write": "st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};"
    f"st.shared.v4.b32 [%r1+{B_AT}], {{%r2, %r2, %r2, %r2}};",
    "copy": "cp.async.cg.shared.global [%r1], [%rd9], 16;"
    f"cp.async.cg.shared.global [%r1+{B_AT}], [%rd9], 16; cp.async.commit_group;",
    "arrive": "cp.async.wait_group 0;",
    "barrier": "bar.sync 0;",
    "proxy": "fence.proxy.async.shared::cta;",
    "proxy-of-one-warp": "@%p2 fence.proxy.async.shared::cta;",
    "fence": "wgmma.fence.sync.aligned;",
    "mma": MMA,
    "mma-registers": FROM_REGISTERS,
    "mma-of-one-warp": f"@%p2 {MMA}",
    "mma-tf32": MMA.replace("k16.f32.bf16.bf16", "k8.f32.tf32.tf32").replace(", 0, 0;", ";"),
    "mma-sums-as-factors": MMA.replace("%r10, %r11, %r12, %r13", "%r18, %r19, %r20, %r21")
    .replace("%rd20", "{%r10, %r11, %r12, %r13}").replace("0, 0;", "0;"),
    "commit": "wgmma.commit_group.sync.aligned;",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "wait-1": "wgmma.wait_group.sync.aligned 1;",
    "read": "add.f32 %r30, %r10, %r11;",
    "set": "mov.b32 %r11, 0;",
    "set-factor": "mov.b32 %r15, 0;",
    "read-factor": "add.f32 %r30, %r15, %r15;",
    "own-descriptors": "cvt.u64.u32 %rd22, %r0; add.s64 %rd20, %rd20, %rd22;",
}  # fmt: skip
START = (
    "shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd9, %r1; add.s64 %rd9, %rd9, %rd0; add.u32 %r1, %r1, %r59;"
    f"mov.b32 %r2, 0; mov.b64 %rd20, {descriptor(0, 32, False)};"
    f"mov.b64 %rd21, {descriptor(B_AT, 32, False)}; mov.pred %p1, -1;"
    "setp.lt.u32 %p2, %r0, 32;"
    + "".join(f"mov.b32 %r{n}, 0;" for n in range(10, 22))
)  # fmt: skip
VISIBLE = "write barrier proxy fence"
SEQUENCES = [
    ("write barrier proxy fence mma commit wait read", ""),
    ("write proxy barrier fence mma commit wait read", ""),  # the writers' fence
    ("copy arrive barrier proxy fence mma commit wait read", ""),
    ("copy arrive proxy barrier fence mma commit wait read", ""),
    ("write barrier proxy-of-one-warp barrier fence mma commit wait read", ""),
    (f"{VISIBLE} mma mma commit wait read", ""),
    (f"{VISIBLE} mma commit mma commit wait read", ""),  # one shape: sums in their order
    (f"{VISIBLE} mma-registers commit read-factor wait set-factor read", ""),
    (f"{VISIBLE} mma commit wait read fence mma commit wait read", ""),
    (f"{VISIBLE} mma commit wait barrier write", ""),
    ("fence mma commit wait read", "that nobody wrote"),
    ("copy barrier proxy fence mma commit wait read", "cp.async has yet to write"),
    ("write proxy fence mma commit wait read", "no barrier"),
    ("write barrier fence mma commit wait read", "no fence.proxy.async"),
    ("copy arrive barrier fence mma commit wait read", "no fence.proxy.async"),
    ("copy proxy arrive barrier fence mma commit wait read", "no fence.proxy.async"),
    ("proxy write barrier fence mma commit wait read", "no fence.proxy.async"),
    ("write barrier proxy-of-one-warp fence mma commit wait read", "no fence.proxy.async"),
    ("write proxy-of-one-warp barrier fence mma commit wait read", "no fence.proxy.async"),
    (f"{VISIBLE} mma commit wait barrier write barrier mma commit wait", "no fence.proxy.async"),
    ("write barrier proxy mma commit wait read", "without a wgmma.fence"),
    (f"{VISIBLE} set mma commit wait read", "without a wgmma.fence"),
    (f"{VISIBLE} set-factor mma-registers commit wait read", "without a wgmma.fence"),
    (f"{VISIBLE} mma commit wait read mma commit wait read", "without a wgmma.fence"),
    (f"{VISIBLE} mma commit read", "that wgmma has yet to write"),
    (f"{VISIBLE} mma wait read", "that wgmma has yet to write"),
    (f"{VISIBLE} mma commit wait-1 read", "that wgmma has yet to write"),
    (f"{VISIBLE} mma commit mma commit wait-1 read", "that wgmma has yet to write"),
    (f"{VISIBLE} mma commit mma wait read", "that wgmma has yet to write"),
    (f"{VISIBLE} mma commit set wait", "that wgmma has yet to write"),
    (f"{VISIBLE} mma-registers commit set-factor wait", "that wgmma has yet to read"),
    (f"{VISIBLE} mma commit barrier write wait", "that wgmma has yet to read"),
    (f"{VISIBLE} mma commit barrier copy wait", "that wgmma has yet to read"),
    (f"{VISIBLE} mma commit wait write", "that another warp just read"),
    (f"{VISIBLE} mma commit mma-tf32 commit wait", "registers of one under way"),
    (f"{VISIBLE} mma commit mma-sums-as-factors commit wait", "registers of one under way"),
    (f"{VISIBLE} mma-of-one-warp commit wait", "have parted"),
    (f"{VISIBLE} own-descriptors mma commit wait", "differs between threads"),
]


@pytest.mark.parametrize("sequence, complaint", SEQUENCES, ids=[s for s, _ in SEQUENCES])
def test_alarms(sequence, complaint):
    body = START + "".join(STEPS[step] + "\n" for step in sequence.split())
    source = np.zeros(2048, np.uint8)
    if not complaint:
        run(body, source, threads=128, shared=END)
        return
    with pytest.raises(PtxError, match=complaint):
        run(body, source, threads=128, shared=END)


def test_ptxas_may_wait_for_each_by_itself():
    """Registers may then be used at once; shared memory is not ptxas's to wait for."""
    start = START + "".join(STEPS[step] for step in VISIBLE.split())
    body = start + STEPS["mma"] + STEPS["commit"] + STEPS["read"]
    run(body, np.zeros(2048, np.uint8), threads=128, shared=END, serialised=True)
    with pytest.raises(PtxError, match="that wgmma has yet to read"):
        body += STEPS["barrier"] + STEPS["write"]
        run(body, np.zeros(2048, np.uint8), threads=128, shared=END, serialised=True)


def test_wgmma_needs_whole_warp_groups():
    with pytest.raises(PtxError, match="unknown form of wgmma"):
        run(START + STEPS["fence"] + MMA, np.zeros(2048, np.uint8), threads=64, shared=END)
