"""A block of a ViT as the compiler wrote it: all launches of inference and of a training step.

The rows of the launch table are those that a model gets with few rows and with many, on the
architectures whose PTX differs most: mma.sync with much and with little shared memory, wgmma.
"""

import copy
import functools

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.evidence.ptx import PtxExecutor
from tests.model.tiny_models import tiny
from tools import gpu_emulated
from vitkern.contract import Error
from vitkern.engines.gpu import GpuEngine
from vitkern.engines.trace import Launchers
from vitkern.gpu.launch import executing
from vitkern.precision import PRECISIONS
from vitkern.verification.models import joint_error

ARCHS = ("sm_80", "sm_89", "sm_90")
TENSOR = {"sm_80": "mma", "sm_89": "mma", "sm_90": "wgmma"}  # what multiplies 16-bit operands
# (images, multiprocessors): small tiles for few rows on a large GPU; the largest for many rows.
SIZES = {"246-rows": (3, 10**6), "656-rows": (8, 1)}


def model_of(numerics, **changes):
    """Two steps of 64 in the first GEMMs of a block, four in its last one: more than the stages."""
    sizes = dict(image_size=72, patch_size=8, width=128, depth=1, heads=2, mlp_width=256)
    return tiny(PRECISIONS[numerics].dtype, **sizes, **changes)


def images(model, count):
    g = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 72, 72, generator=g).to(model.dtype)


def emulator(arch, numerics, processors=None):
    executor = PtxExecutor(arch)
    executor.tf32 = numerics == "tf32" if PRECISIONS[numerics].dtype == torch.float32 else None
    executor.processors = processors
    return executor


def cases(default):
    """(arch, numerics, size), all but `default` long."""
    found = []
    for arch in ARCHS:
        for numerics in PRECISIONS:
            for size in SIZES:
                case = arch, numerics, size
                marks = () if case in default else pytest.mark.ptx_full
                found.append(pytest.param(*case, id="-".join(case), marks=marks))
    return found


def check_moments(launch):
    """Those that a launch left of the rows that it wrote: sums, and squares about their mean."""
    given = launch.arguments
    name = next(n for n in ("parts", "moments") if n in given)
    if given[name] is None:
        return False
    y, parts = given["y"].double().reshape(-1, given["y"].shape[-1]), given[name].double()
    width = y.shape[1] / parts.shape[0]
    mean = parts[..., 0].sum(0) / y.shape[1]
    squares = (parts[..., 1] + (parts[..., 0] / width - mean).square() * width).sum(0)
    assert torch.allclose(mean, y.mean(1), rtol=0, atol=1e-5 * y.abs().max())
    assert torch.allclose(squares / y.shape[1], y.var(1, correction=0), rtol=1e-4)
    return True


@pytest.mark.parametrize(
    "arch, numerics, size", cases({("sm_80", "bf16", "656-rows"), ("sm_90", "bf16", "656-rows")})
)
def test_inference_of_a_block(arch, numerics, size):
    count, processors = SIZES[size]
    model = model_of(numerics).eval()
    image, executor = images(model, count), emulator(arch, numerics, processors)
    left = []
    run = executor.run

    def watched(launch):
        run(launch)
        if any(n in launch.writes for n in ("parts", "moments")):
            left.append(check_moments(launch))

    executor.run = watched
    got = GpuEngine(model, numerics, executor).tokens(image)
    names = [one.kernel.__name__ for one in executor.launches]
    block = ["folded_linear_forward", "attention_forward", "linear_residual_forward"]
    block += ["folded_linear_forward", "linear_residual_forward"]
    assert names[:6] == ["patch_embed_forward", *block]
    assert sum(left) >= 2, "the embedding and the first half of the block leave moments"
    if PRECISIONS[numerics].dtype != torch.float32:
        assert len(executor.classes()[TENSOR[arch]]) >= 5
        assert executor.executed[TENSOR[arch]] > 1000
    assert got.isfinite().all()
    truth, theirs = reference(numerics, count)
    ours = Error.of(got, truth)
    assert ours.within(theirs, model.dtype, gpu=PRECISIONS[numerics]), f"{ours}, torch's {theirs}"


@functools.cache
def reference(numerics, count):
    """The tokens in float64, and torch's error at this precision, measured on the last image."""
    model = model_of(numerics).eval()
    image, wide = images(model, count), copy.deepcopy(model).double()
    with torch.no_grad():
        truth = wide.reference_forward(image.double(), head=False)
        with FixedOrder(tf32=numerics == "tf32"):
            torchs = model.reference_forward(image[-1:], head=False)
    return truth, Error.of(torchs, truth[-1:])


@pytest.mark.ptx_full
@pytest.mark.parametrize("arch, numerics, size", cases(()))
def test_training_step_of_a_block(arch, numerics, size):
    count, processors = SIZES[size]
    model = model_of(numerics, layer_scale=0.5, dropout=0.1, attention_dropout=0.2, drop_path=0.1)
    executor = emulator(arch, numerics, processors)
    with executing(executor), Launchers():
        ours = gradients(model, images(model, count), model.dtype, "fused")
    names = {one.kernel.__name__ for one in executor.launches}
    assert not executor.serialised
    backward = {"attention_backward_queries", "attention_backward_keys", "weight_gradient_kernel"}
    assert backward <= names, names
    truths, torchs = reference_gradients(numerics, count)
    got, theirs = joint_error(ours, truths), joint_error(torchs, truths)
    assert got.within(theirs, model.dtype, gpu=PRECISIONS[numerics]), f"{got}, torch's {theirs}"


@functools.cache
def reference_gradients(numerics, count):
    """Of all parameters in float64, and torch's at this precision."""
    model = model_of(numerics, layer_scale=0.5, dropout=0.1, attention_dropout=0.2, drop_path=0.1)
    image = images(model, count)
    truths = gradients(model, image, torch.float64, "reference")
    with FixedOrder(tf32=numerics == "tf32"):
        return truths, gradients(model, image, model.dtype, "reference")


def gradients(model, image, dtype, path):
    """Of a loss, by all parameters, with the same dropout masks each time."""
    model = copy.deepcopy(model).to(dtype).train()
    torch.manual_seed(7)
    y = getattr(model, f"{path}_forward")(image.to(dtype))
    labels = torch.arange(len(image)) % y.shape[1]
    loss = torch.nn.functional.cross_entropy(y, labels)
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


def test_the_page_has_the_recorded_counts():
    rows = gpu_emulated.recorded()
    assert gpu_emulated.table(rows) in gpu_emulated.PAGE.read_text(), (
        "run python -m tools.gpu_emulated"
    )
    for arch, row in rows.items():
        assert row["executed"][TENSOR[arch]] > 0 and row["cases"] == 2 * len(cases(())) / len(ARCHS)
