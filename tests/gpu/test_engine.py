"""The GPU engine: its plans in the interpreter and through C++, and what starts them."""

import copy
import json
import types

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import fake_cuda
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.evidence.interpreter import Interpreter
from tests.gpu import stand_in
from tests.gpu.contract import gpu
from tests.model.tiny_models import OPTIONS, check_error, tiny
from vitkern import _C, ViT, ViTConfig
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import launch, layernorm
from vitkern.gpu.aot import build as aot
from vitkern.gpu.runtime import device, plan
from vitkern.gpu.runtime.binary import BinaryError, BinaryExecutor, Store
from vitkern.precision import PRECISIONS, name_of

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def images(model, batch=3, dtype=None):
    c = model.config
    sides = c.image_size if isinstance(c.image_size, tuple) else (c.image_size, c.image_size)
    g = torch.Generator().manual_seed(5)
    return torch.randn(batch, c.channels, *sides, generator=g).to(dtype or model.dtype)


def check(got, model, image, want="logits", precision=None):
    """The error contract, as every path of a model is held to."""
    function = {"logits": ViT.forward, "tokens": ViT.forward_features}[want]
    wide = copy.deepcopy(model).double()
    wide.path, model.path, model.precision = "reference", "reference", precision
    try:
        with torch.no_grad(), FixedOrder():
            truth = function(wide, image if image.dtype == torch.uint8 else image.double())
            torchs = function(model, image)
    finally:
        model.path, model.precision = "auto", None
    row = PRECISIONS[precision or name_of(model.dtype)]
    check_error(got, torchs, truth, row.dtype, want, row)


@pytest.mark.parametrize("option", OPTIONS)
def test_matches_reference_with_every_option(option):
    model = tiny(**OPTIONS[option]).eval()
    image = images(model)
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    check(engine.logits(image), model, image)
    check(engine.tokens(image), model, image, "tokens")


HEADS_AND_POSITIONS = {
    "map": dict(pool="map", class_token=False),
    "distilled": dict(head="distilled"),
    "no-key-bias": dict(key_bias=False, position="relative"),
    "relative-mlp": dict(position="relative_mlp", relative_width=8),
    "shared-relative-mlp": dict(position="shared_relative_mlp", relative_width=8),
    "crop": dict(image_size=(26, 19), crop=True),
}


@pytest.mark.parametrize("option", HEADS_AND_POSITIONS)
def test_matches_reference_with_heads_and_positions_of_timms_families(option):
    model = tiny(**HEADS_AND_POSITIONS[option]).eval()
    image = images(model)
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    check(engine.logits(image), model, image)
    check(engine.tokens(image), model, image, "tokens")


@pytest.mark.parametrize("block, norm", [("post_norm", "layernorm"), ("pre_norm", "rmsnorm")])
def test_blocks_that_the_engine_lacks_are_named(block, norm):
    model = tiny(block=block, norm=norm)
    assert f"no {block} blocks with {norm}" in GpuEngine.why_not(model, images(model), "fp32")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("take, stop", [((1,), 3), ((0, 2), 3), ((), 2), ((0,), 1), ((), 0)])
def test_rows_after_blocks_are_the_references(take, stop, norm):
    model = tiny().eval()
    image = images(model)
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    model.path = "reference"
    with torch.no_grad():
        for _ in range(2):  # the second time from the recorded plan, into other memory
            x, kept = engine.blocks(image, take, stop, norm)
            wanted, rows = model.forward_blocks(image, take, stop, norm)
            torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(kept, rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "gfx942"))
@pytest.mark.parametrize(
    "dtype, precision", [(FP32, "tf32"), (FP32, "bf16"), (FP16, "fp16"), (BF16, "bf16")]
)
def test_matches_reference_in_every_precision(dtype, precision, arch):
    model = tiny(dtype).eval()
    image = images(model)
    engine = GpuEngine(model, precision, Interpreter(arch))
    asked = precision if dtype == FP32 else None
    if precision == "tf32":  # between fp32 and bf16, which is what torch has to compare with here
        asked = "bf16"
    check(engine.tokens(image), model, image, "tokens", asked)


def test_reads_bytes_in_any_layout():
    model = tiny(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)).eval()
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (2, 24, 16, 3), generator=g, dtype=torch.uint8).permute(0, 3, 1, 2)
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    for image in (pixels, pixels.contiguous()):
        check(engine.logits(image), model, image)


def test_large_means_and_outlier_channels_do_not_cancel():
    """Folding LayerNorm into the GEMM subtracts after multiplying: real streams must survive."""
    model = tiny().eval()
    with torch.no_grad():
        model.patch_embed.proj.bias.add_(20)
        model.pos_embed[..., 5] += 60
    image = images(model)
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    check(engine.logits(image), model, image)


def test_a_plan_serves_other_images_of_its_shape_and_only_those():
    model = tiny().eval()
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    first, second = images(model), images(model).flip(0)
    together = engine.logits(first)
    assert torch.equal(engine.logits(second).flip(0), together)
    assert len(engine.launches) == 1
    assert torch.equal(engine.logits(first[:2]), together[:2])
    assert len(engine.launches) == 2


def test_a_changed_parameter_makes_the_engine_stale():
    model = tiny().eval()
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    assert not engine.stale()
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert engine.stale()


def recorded(model, image, precision="bf16", arch="sm_80"):
    recorder = launch.Recorder(arch)
    engine = GpuEngine(model, precision, recorder)
    y = torch.empty(image.shape[0], model.config.classes, dtype=model.dtype, device=image.device)
    return plan.record(recorder, None, lambda: engine.start("logits", image, y))


def test_a_block_is_five_launches_and_a_model_two_more():
    model = ViT(ViTConfig.named("B/16"), device="meta", dtype=BF16).eval()
    image = torch.empty(8, 3, 224, 224, dtype=BF16, device="meta")
    launches = recorded(model, image)
    names = [one.kernel.__name__ for one in launches]
    block = ["folded_linear_forward", "attention_forward", "linear_residual_forward"]
    block += ["folded_linear_forward", "linear_residual_forward"]
    assert names == ["patch_embed_forward", *block * 12, "folded_linear_forward"]
    assert len(names) == 62
    rows = launches[-2].arguments["M"]
    assert rows == 8, "after its keys and values the last block computes the class row alone"


# ---- through C++ -------------------------------------------------------------


@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "sm_100", "sm_120"))
def test_one_cpp_call_computes_a_vit_through_the_test_driver(arch, tmp_path):
    """The whole chain but the chip: launchers, real binaries, manifest, C++ plan, driver calls."""
    model = tiny(BF16, width=64, mlp_width=128, depth=2, classes=40).eval()
    image, fake = images(model, batch=2), fake_cuda()
    executor = stand_in.build(recorded(model, image, arch=arch), arch, tmp_path)
    engine = GpuEngine(model, "bf16", executor)
    before = len(fake.journal())
    logits = engine.logits(image)
    assert engine.native
    launched = [line for line in fake.journal()[before:] if line.startswith("cuLaunchKernel")]
    assert len(launched) == 1 + 5 * 2 + 1
    check(logits, model, image)
    other = image.flip(0)
    assert torch.equal(engine.logits(other).flip(0), logits)
    direct = GpuEngine(model, "bf16", Interpreter(arch)).logits(image)
    assert torch.equal(direct, logits), "the driver was given other arguments than the interpreter"


def test_binaries_of_another_source_are_refused(tmp_path):
    """After an upgrade a folder's kernels may compute something else under the same name."""
    x, y = torch.randn(4, 64), torch.empty(4, 64)
    recorder = launch.Recorder("sm_80")
    with launch.executing(recorder):
        layernorm.normalise(x, None, None, y, 1e-6)
    aot.build({"sm_80": {recorder.launches[0].variant}}, tmp_path, jobs=1)
    manifest = tmp_path / "manifest.json"
    made = json.loads(manifest.read_text())
    made["kernels"][0]["source"] = "older"
    manifest.write_text(json.dumps(made))
    driver = _C.Driver("cuda", fake_cuda().path)
    executor = BinaryExecutor(Store(tmp_path), 0, "sm_80", driver, lambda: 0, torch.device("cpu"))
    with pytest.raises(BinaryError, match="another version of its source: build again"):
        executor.run(recorder.launches[0])


# ---- the device's executor ---------------------------------------------------


@pytest.fixture
def pretend_device(monkeypatch):
    """A GPU by its properties alone: nothing can be launched on it."""

    def make(major, minor):
        properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=7)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return torch.device("cuda", 0)

    return make


def test_unknown_chips_use_the_settings_of_their_elders(pretend_device):
    for chip, served in {(8, 0): "sm_80", (8, 7): "sm_86", (12, 1): "sm_120"}.items():
        executor = device.DeviceExecutor(pretend_device(*chip), None)
        assert executor.arch == served
        assert "compiled by Triton" in executor.status()


def test_says_when_binaries_are_for_other_chips(pretend_device, tmp_path):
    (tmp_path / "manifest.json").write_text('{"vitkern": "0", "triton": "0", "kernels": []}')
    driver = _C.Driver("cuda", fake_cuda().path)
    executor = device.DeviceExecutor(pretend_device(9, 0), Store(tmp_path), driver=driver)
    assert "no binaries for sm_90" in executor.status()
    assert executor.native.store is None and executor.native.cache.arch == "sm_90"


def test_a_missing_folder_of_binaries_is_an_error_at_once(tmp_path):
    with pytest.raises(BinaryError, match=r"manifest.json cannot be read"):
        device.use_binaries(tmp_path / "nowhere")
    device.use_binaries(None)


@pytest.mark.parametrize(
    "changes, image, precision, reason",
    [
        ({"width": 1024, "heads": 2}, torch.float32, "fp32", "too wide for the GPU's attention"),
        ({}, torch.float64, "fp32", "float64"),
        ({}, torch.float32, "fp64", "computes in"),
    ],
)
def test_says_why_it_cannot_serve(changes, image, precision, reason):
    model = tiny(**changes).eval()
    assert reason in GpuEngine.why_not(model, images(model, dtype=image), precision)
    assert not GpuEngine.why_not(tiny().eval(), images(tiny()), "fp32")
    assert set(PRECISIONS) == {"fp32", "tf32", "bf16", "fp16"}


def test_operators_are_registered_for_gpus_and_reach_the_launchers():
    """The CUDA key's kernels with tensors that the interpreter can read."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x, weight, bias = torch.randn(5, 48), torch.rand(48), torch.randn(48)
    with gpu("fp32"):
        y, stats = torch.ops.vitkern.layernorm.default.redispatch(keys, x, weight, bias, 1e-6, True)
        backward = torch.ops.vitkern.layernorm_backward.default
        needs = [True, True, False, False, False]
        grads = backward.redispatch(
            keys, torch.ones_like(y), x, weight, bias, 1e-6, True, [stats], needs
        )
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (48,), weight, bias, 1e-6))
    assert [g.shape for g in grads] == [x.shape, weight.shape]
