"""patch_embed's GPU kernels in the interpreter: layouts, pixel types, statistics, gradients."""

import itertools

import pytest
import torch

import vitkern.ops  # noqa: F401  (fills the registry)
from vitkern import philox
from vitkern.registry import LAYOUTS, REGISTRY

pytest.importorskip("triton")
import triton
import triton.language as tl

from tests.evidence.interpreter import Interpreter
from tests.gpu import contract
from vitkern.gpu import moments as row_moments
from vitkern.gpu import patch_embed, patch_embed_backward, pixels
from vitkern.gpu.configs import ARCHS, TABLE, Row
from vitkern.gpu.launch import Recorder, executing, launch
from vitkern.verification.operators import cast

SPECS = [s for s in REGISTRY.values() if s.op.name == "patch_embed"]
PLAIN, BYTES, DROPOUT = SPECS
ODD, FOURTEEN, REAL = PLAIN.cases[2:]
BF16, FP32 = torch.bfloat16, torch.float32


# ---- Where pixels may lie ----------------------------------------------------

IMAGES = {
    "nchw": ("planes", lambda t: t.contiguous()),
    "nhwc": ("pixels", lambda t: t.contiguous(memory_format=torch.channels_last)),
    "cropped": (
        "planes",
        lambda t: torch.nn.functional.pad(t.contiguous(), (3, 2, 1, 4))[..., 1:-4, 3:-2],
    ),
    "rgba": ("strided", lambda t: torch.cat([t, t], 1).permute(0, 2, 3, 1).contiguous()),
    "transposed": ("strided", lambda t: t.mT.contiguous().mT),
    "samples inside": (
        "strided",
        lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    ),
}


def placed(image, layout):
    order, place = IMAGES[layout]
    laid = place(image)
    if layout == "rgba":
        laid = laid.permute(0, 3, 1, 2)[:, : image.shape[1]]
    assert torch.equal(laid, image) and pixels.order_of(laid) == order
    return laid


@pytest.mark.parametrize("layout", IMAGES)
@pytest.mark.parametrize("axes", (ODD, FOURTEEN), ids=("3x5", "14x14"))
@pytest.mark.parametrize("spec", (PLAIN, BYTES), ids=lambda s: s.name)
def test_reads_the_image_where_it_lies(spec, axes, layout):
    inputs = spec.make_inputs({**axes, "B": 2}, FP32)
    inputs["image"] = placed(inputs["image"], layout)
    contract.check_both(spec, inputs)


@pytest.mark.parametrize("order", ("filters", "channels last"))
def test_filters_of_channels_last_images(order):
    """Read as they lie, or reordered first: the same numbers, the same results."""
    inputs = BYTES.make_inputs(ODD, FP32)
    if order == "channels last":
        inputs["weight"] = inputs["weight"].contiguous(memory_format=torch.channels_last)
    with executing(Recorder("sm_80")) as recorder:
        contract.run(BYTES, inputs)
    (found,) = recorder.launches
    read, given = found.arguments["weight"], inputs["weight"]
    assert torch.equal(read.flatten(), given.permute(0, 2, 3, 1).flatten())
    assert (read.data_ptr() == given.data_ptr()) == (order == "channels last")
    contract.check_both(BYTES, inputs)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_accepts_any_layout_of_the_other_tensors(spec, layout):
    contract.check_both(spec, spec.make_inputs(ODD, FP32, layout))


# ---- Kinds of numbers --------------------------------------------------------


@pytest.mark.parametrize("kind", (torch.uint8, torch.float16, BF16, FP32), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("numerics", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("normalised", (True, False), ids=("mean-std", "as-they-are"))
def test_pixels_need_not_be_of_the_weights_dtype(kind, numerics, normalised):
    spec = BYTES if normalised else PLAIN
    inputs = spec.make_inputs(ODD, contract.DTYPES[numerics])
    image = (inputs["image"].float() * (1 if normalised else 64)).clamp(0, 255).round()
    inputs["image"] = image.to(kind) if kind == torch.uint8 else (image / 255).to(kind)
    with contract.gpu(numerics):
        (y,) = contract.run(spec, inputs)
        given = cast(inputs, FP32)
        truth = spec.op.reference(*spec.arguments(cast(given, torch.float64)))[0]
    with contract.yardstick(numerics):
        theirs = spec.op.reference(*spec.arguments(inputs))[0]
    assert not contract.problem(y, theirs, truth, spec.slack, numerics)


def test_vectors_may_have_another_dtype():
    inputs = PLAIN.make_inputs(ODD, BF16)
    for name in ("bias", "prefix", "position"):
        inputs[name] = inputs[name].float() * 1.001  # no bf16 number any more
    contract.check_both(PLAIN, inputs, "bf16")


def test_large_means_cancel_before_they_are_rounded():
    inputs = PLAIN.make_inputs(REAL, FP32)
    inputs["image"] += 1000
    inputs |= {"mean": torch.full((3,), 1000.0), "std": torch.tensor([0.2, 0.3, 2.0])}
    contract.check_both(PLAIN, inputs)


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")), ids=str)
@pytest.mark.parametrize("axes", (ODD, FOURTEEN), ids=("3x5", "14x14"))
def test_nan_and_inf_come_out_where_the_reference_has_them(axes, bad):
    """Also from the last patch, which stands in for the rows that a tile has too many."""
    inputs = PLAIN.make_inputs(axes, FP32)
    inputs["image"][-1, -1, -1, -1] = bad
    names = ["weight"]
    with contract.gpu("fp32"):
        results = contract.run(PLAIN, inputs)
        (dweight,) = contract.run_backward(PLAIN, inputs, names)
    contract.check(PLAIN, results, inputs, "fp32")
    (truth,) = contract.reference_gradients(PLAIN, inputs, names, torch.float64)
    assert torch.equal(dweight.isfinite(), truth.isfinite())


# ---- Dropout -----------------------------------------------------------------


@pytest.mark.parametrize("p", (0.3, 1.0))
@pytest.mark.parametrize("D", (17, 20), ids=("one-by-one", "in-fours"))
def test_drops_what_the_reference_drops(D, p):
    inputs = PLAIN.make_inputs({**ODD, "D": D}, FP32) | {"seed": torch.tensor([2**61 + 12345])}
    args = PLAIN.arguments(inputs)
    args[PLAIN.op.arguments.index("dropout_p")] = p
    shape = PLAIN.op.call_shape(dict(zip(PLAIN.op.arguments, args, strict=True)))
    results = shape.allocate(args[0])
    with contract.gpu("fp32"):
        patch_embed.forward(shape.sizes, results, *args)
    kept = philox.dropout_mask(inputs["seed"], p, tuple(results[0].shape))
    assert torch.equal(results[0] != 0, kept)


# ---- Statistics for the first LayerNorm --------------------------------------


@triton.jit
def _read_moments(moments, stats, M, D, eps, BM: tl.constexpr, PART: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < M
    mean, rstd = row_moments.load(moments, rows, live, M, D, eps, PART)
    tl.store(stats + rows * 2, mean, mask=live)
    tl.store(stats + rows * 2 + 1, rstd, mask=live)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("axes", (ODD, FOURTEEN, REAL), ids=("17", "67", "192"))
def test_moments_are_those_of_the_rows(axes, dtype):
    inputs = PLAIN.make_inputs(axes, dtype)
    inputs["position"] += 100  # a large mean must not cost digits of the variance
    args = PLAIN.arguments(inputs)
    n = PLAIN.sizes(axes)
    y = torch.empty(n["B"], n["S"], n["D"], dtype=dtype)
    M, D = n["B"] * n["S"], n["D"]
    with contract.gpu("fp32"):
        width = row_moments.WIDTH
        moments = torch.full((-(-D // width), M, 2), float("nan"))
        patch_embed.embed(y, *args, moments=moments)
        stats = torch.empty(M, 2)
        row = Row({"BM": 16, "PART": width}, 4, 1, "")
        launch(
            _read_moments, (-(-M // 16),), row, ("stats",), moments=moments, stats=stats, M=M, D=D,
            eps=1e-6,
        )  # fmt: skip
    rows = y.double().view(M, D)
    rstd = (rows.var(1, correction=0) + 1e-6).rsqrt()
    torch.testing.assert_close(stats[:, 0].double(), rows.mean(1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(stats[:, 1].double(), rstd, rtol=1e-5, atol=0)
    plain = PLAIN.op.call_shape(dict(zip(PLAIN.op.arguments, args, strict=True))).allocate(args[0])
    with contract.gpu("fp32"):
        patch_embed.forward(n, plain, *args)
    assert torch.equal(plain[0], y)


# ---- Launches ----------------------------------------------------------------


@pytest.mark.parametrize("numerics", ("fp32", "bf16"))
@pytest.mark.parametrize("arch", ARCHS)
def test_settings_of_every_architecture(arch, numerics):
    contract.check_both(BYTES, BYTES.make_inputs(ODD, contract.DTYPES[numerics]), numerics,
                    Interpreter(arch))  # fmt: skip


KERNELS = ("patch_embed_forward", "patch_embed_weight_gradient", "patch_embed_image_gradient")


@pytest.mark.parametrize("kernel, index", [(k, i) for k in KERNELS for i in range(len(TABLE[k]))])
def test_every_row_of_the_table(kernel, index, monkeypatch):
    """On shapes that fill no tile; dweight from two to four shares of the rows."""
    row = TABLE[kernel][index]
    row = row._replace(upto={}, bits=(16, 32), archs=ARCHS)
    monkeypatch.setitem(TABLE, kernel, (row,))
    axes = {"B": 90, "C": 3, "Y": 21, "X": 8, "py": 7, "px": 4, "D": 67, "T": 1}  # 540 patches
    spec = BYTES if kernel == "patch_embed_weight_gradient" else PLAIN
    inputs = spec.make_inputs(axes, BF16)
    with contract.gpu("bf16"):
        if kernel == "patch_embed_forward":
            contract.check(spec, contract.run(spec, inputs), inputs, "bf16")
        else:
            names = [kernel.split("_")[2]]  # weight or image
            grads = contract.run_backward(spec, inputs, names)
            contract.check_gradients(spec, grads, inputs, names, "bf16")


def test_rows_are_cut_into_shares_that_cover_them():
    row = TABLE["patch_embed_weight_gradient"][-1]
    for M, tiles in itertools.product((0, 1, 31, 128, 129, 1000, 12544), (0, 1, 36, 300)):
        shares, span = patch_embed_backward._shares(M, tiles, row)
        assert shares >= 1 and span % row.blocks["BM"] == 0
        assert shares * span >= M and (shares - 1) * span < max(M, 1)


def test_the_order_of_programs_does_not_matter():
    inputs = PLAIN.make_inputs({**ODD, "B": 40}, FP32)  # two shares of the rows
    names = contract.differentiable(PLAIN, inputs)
    found = []
    for executor in (Interpreter("sm_80"), Interpreter("sm_80", order="shuffled", seed=3)):
        with contract.gpu("fp32", executor):
            found.append(contract.run(PLAIN, inputs))
            found[-1] += contract.run_backward(PLAIN, inputs, names)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "axes",
    (
        {**ODD, "B": 0},
        {**ODD, "T": 0},
        {**ODD, "D": 0},
        {**ODD, "Y": 0},
        {**ODD, "C": 0},
        {"B": 2, "C": 3, "Y": 2, "X": 2, "py": 1, "px": 1, "D": 1, "T": 1},
    ),
    ids=("no samples", "no prefix", "no width", "no patches", "no channels", "1x1"),
)
def test_sizes_that_leave_little_to_do(axes):
    contract.check_both(PLAIN, PLAIN.make_inputs(axes, FP32))


@pytest.mark.parametrize("wanted", ("image", "weight", "bias", "prefix", "position"))
def test_computes_only_what_is_asked_for(wanted):
    inputs = PLAIN.make_inputs(ODD, FP32)
    with contract.gpu("fp32"):
        grads = contract.run_backward(PLAIN, inputs, [wanted])
    contract.check_gradients(PLAIN, grads, inputs, [wanted], "fp32")
    kernels = {
        "image": ["patch_embed_image_gradient"],
        "weight": ["patch_embed_weight_gradient"],
        "bias": ["patch_embed_token_sums", "sum_parts_kernel"],
    }
    args = tuple(PLAIN.arguments(inputs))
    grad = torch.zeros(2, 11, 17)
    with executing(Recorder("sm_80")) as recorder:
        patch_embed.backward(grad, args, [], frozenset({wanted}))
    names = [found.kernel.__name__ for found in recorder.launches]
    assert names == kernels.get(wanted, ["patch_embed_token_sums"])


def test_one_launch_forward():
    with executing(Recorder("sm_80")) as recorder:
        contract.run(BYTES, BYTES.make_inputs(REAL, BF16))
    assert [found.kernel.__name__ for found in recorder.launches] == ["patch_embed_forward"]
