"""int8: the engine has the reference's bits, refuses what it cannot do, and says what it costs."""

import copy

import pytest
import torch

import vitkern
from tests.model.tiny_models import OPTIONS, picture, tiny
from vitkern import ViT, cpu, int8
from vitkern.contract import Error, judge
from vitkern.engines.cpu import CpuEngine
from vitkern.quantisation import simulated

ISAS = cpu.isas()


@pytest.fixture
def everywhere(monkeypatch):
    """The patch embedding and the head in int8, too: single linear layers to look at."""
    monkeypatch.setattr(int8, "is_matrix", lambda name, p: p.ndim > 1 and name.endswith(".weight"))


def embedding(channels: int, patch: int, width: int) -> ViT:
    """A model that is one linear layer: its rows are those of the patch embedding."""
    shape = {"channels": channels, "patch_size": patch, "width": width, "heads": 1, "depth": 0}
    return tiny(
        **shape, image_size=3 * patch, mlp_width=8, classes=0, class_token=False, pool="mean",
        position="none", final_norm="none",
    )  # fmt: skip


def patches(model: ViT, image: torch.Tensor) -> torch.Tensor:
    size = model.config.patch_size
    return torch.nn.functional.unfold(image, size, stride=size).mT


def linear(model: ViT, image: torch.Tensor) -> torch.Tensor:
    proj = model.patch_embed.proj
    return int8.linear(patches(model, image), int8.quantise_weight(proj.weight), proj.bias)


@pytest.mark.parametrize(
    "channels, patch, width",
    [(1, 1, 1), (1, 3, 5), (3, 5, 33), (2, 8, 64), (3, 16, 40), (4, 29, 7)],
)
@pytest.mark.parametrize("isa", ISAS)
def test_a_linear_layer_has_the_bits_of_the_reference(isa, channels, patch, width, everywhere):
    model = embedding(channels, patch, width)
    for scale in (1, 1e-20, 1e30):
        image = picture(model) * scale
        with torch.inference_mode():
            got = CpuEngine(model, "int8", isa=isa).tokens(image)
            assert torch.equal(got, linear(model, image))


@pytest.mark.parametrize("sign", [1, -1, 0])
@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_sums_are_exact(isa, sign, everywhere):
    """Equal weights, or large ones of both signs beside each other, and the largest activations."""
    model = embedding(4, 29, 32)
    with torch.no_grad():
        weight = model.patch_embed.proj.weight
        weight.fill_(sign or 1)
        if not sign:
            weight.view(32, -1)[:, ::3] = -1
            weight.view(32, -1)[:, 5] = 0.01
    image = torch.ones(2, 4, 87, 87)
    image[1, :, :, ::2] = -3
    with torch.inference_mode():
        got = CpuEngine(model, "int8", isa=isa).tokens(image)
        assert torch.equal(got, linear(model, image))


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "no-blocks"])
def test_is_as_exact_as_its_simulation(option):
    """The simulation takes PyTorch's place in the error contract."""
    model = tiny(**OPTIONS[option])
    image = picture(model)
    wide = copy.deepcopy(model).double()
    wide.path = "reference"
    with torch.inference_mode():
        truth, slow = wide(image.double()), simulated(model)(image)
        model.precision = "int8"
        ours = model(image)
    slack = (2.0, 1.25) if truth.numel() > 50 else (4.0, 4.0)
    verdict = judge(ours, slow, truth, dtype=torch.float32, slack=slack)
    assert verdict.passed, verdict.problem
    # An activation that falls between two integers may go either way: no more than that. Up to 0.69
    # where the patch embedding is in 16-bit integers and not, as the simulation's, in fp32.
    assert Error.of(ours, slow).rms < max(0.75 * verdict.torchs.rms, 1e-6)


def test_patch_embedding_and_head_keep_bf16s_contract():
    """They are not in 8 bits, and all that a model without blocks has."""
    model = tiny(**OPTIONS["no-blocks"])
    image = picture(model)
    wide, short = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    for one in (wide, short):
        one.path = "reference"
    with torch.inference_mode():
        model.precision = "int8"
        ours, truth = model(image), wide(image.double())
        verdict = judge(ours, short(image.bfloat16()), truth, dtype=torch.bfloat16)
    assert verdict.passed, verdict.problem
    assert verdict.ours.rms < 0.25 * verdict.torchs.rms  # a sixteenth of bf16's, or fp32's error


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_is_as_exact(isa):
    model = tiny(width=96, heads=3, mlp_width=200)
    image = picture(model)
    with torch.inference_mode():
        slow = simulated(model)(image)
        exact = model(image)
        got = CpuEngine(model, "int8", isa=isa).logits(image)
    assert Error.of(got, slow).rms < 0.5 * Error.of(slow, exact).rms


def test_integers_fit_into_what_cpus_add_them_in():
    torch.manual_seed(0)
    weight = torch.randn(64, 333) * torch.rand(64, 1)
    weight[0], weight[1], weight[2, 5], weight[3, 0] = 1, -0.25, torch.nan, torch.inf
    weight[4] = 0
    found = int8.quantise_weight(weight)
    wide = torch.nn.functional.pad(found.integers.int(), (0, 3)).view(64, -1, 2, 2, 2)
    for signed in (wide.clamp_min(0), -wide.clamp_max(0)):
        assert signed.sum((2, 4)).max() <= 128  # times 255 is below 2^15
    assert found.integers.abs().max() <= 127
    assert found.scales[2:4].isnan().all() and not found.integers[2:4].any()
    assert not found.values()[4].any()
    rest = torch.tensor([0, 1, *range(5, 64)])
    miss = (found.values() - weight)[rest].abs() / found.scales[rest, None]
    assert miss.max() <= 0.5001


def test_smoothing_shares_outlier_columns(monkeypatch):
    """One column in forty outweighs the others in the norms, as in trained ViTs."""
    model = tiny(width=160, heads=2, mlp_width=300)
    with torch.no_grad():
        for block in model.blocks:
            for norm in (block.norm1, block.norm2):
                norm.weight[::40] *= 40
    norm = model.blocks[0].norm1
    by = int8.smoothing(norm.weight.detach(), norm.bias.detach())
    assert by[::40].min() >= 4 * by.median() and torch.equal(by.log2(), by.log2().round())
    image = picture(model)
    with torch.inference_mode():
        exact = model(image)
        smoothed = Error.of(CpuEngine(model, "int8").logits(image), exact).rms
        monkeypatch.setattr(int8, "smoothing", lambda weight, bias: torch.ones_like(weight))
        plain = Error.of(CpuEngine(model, "int8").logits(image), exact).rms
    print(f"logits' error {smoothed:.2%} with smoothing, {plain:.2%} without")
    assert smoothed < 0.7 * plain


def test_a_bad_weight_spoils_its_own_column(everywhere):
    model = tiny()
    with torch.no_grad():
        model.head.weight[3, 4] = torch.nan
        model.head.weight[7, 1] = torch.inf
    model.precision = "int8"
    with torch.inference_mode():
        got = model(picture(model))
    assert got[:, [3, 7]].isnan().all() and got.isnan().sum() == 2 * len(got)


# ---- what it refuses ----


def test_refuses_what_only_floats_can_do():
    model = tiny()
    model.precision = "int8"
    image = picture(model)
    with pytest.raises(RuntimeError, match=r"'int8' is of the packed CPU engine.*gradients"):
        model(image)
    with torch.inference_mode():
        for path in ("fused", "reference"):
            model.path = path
            with pytest.raises(RuntimeError, match=f'int8.*model.path is "{path}"'):
                model(image)
        model.path = "auto"
        with pytest.raises(RuntimeError, match=r"int8.*training mode"):
            model.train()(image)
        model.eval().double()
        with pytest.raises(RuntimeError, match=r"int8.*float64.*model\.precision = None"):
            model(image.double())
        model = tiny()
        model.precision = "int8"
        assert "path: engine" in model.explain() and "precision: int8" in model.explain()


def test_refuses_other_devices():
    model = tiny().to("meta")
    model.precision = "int8"
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"int8.*device meta"):
        model(picture(model).to("meta"))
    from vitkern.engines.gpu import GpuEngine

    assert "not int8" in GpuEngine.why_not(model, picture(tiny()), "int8")


# ---- quantise ----


def test_quantise_reports_what_it_costs():
    model = tiny()
    image = picture(model, B=11)
    with torch.inference_mode():
        exact = model(image)
        report = vitkern.quantise(model, [image[:2], image[2:]])
        ours = model(image)
    assert model.precision == "int8" and report.images == 11 and not report.synthetic
    assert report.agreement == (ours.argmax(1) == exact.argmax(1)).double().mean()
    assert report.error == pytest.approx(Error.of(ours, exact).rms, rel=1e-4)
    assert report.worst == pytest.approx(Error.of(ours, exact).worst, rel=1e-4)
    assert len(report.layers) == 4 * model.config.depth
    assert all(0 < la.weight_error < 0.02 and 0 < la.error < 0.03 for la in report.layers)
    assert report.packed_bytes < 0.4 * report.parameter_bytes
    text = str(report)
    assert "11 images" in text and "blocks.2.mlp.fc2" in text and "same first class" in text


def test_quantise_without_images_says_so():
    report = vitkern.quantise(tiny(classes=0))
    assert report.synthetic and report.agreement is None
    assert "synthetic" in str(report) and "no classes" in str(report)


def test_quantise_refuses_what_it_cannot_measure():
    with pytest.raises(TypeError, match=r"expected a vitkern\.ViT, got Linear.*accelerate"):
        vitkern.quantise(torch.nn.Linear(2, 2))
    model = tiny()
    with pytest.raises(ValueError, match="in training mode"):
        vitkern.quantise(tiny().train())
    with pytest.raises(ValueError, match=r"batches \(B, C, Y, X\), got \(3, 24, 16\)"):
        vitkern.quantise(model, picture(model)[0])
    with pytest.raises(ValueError, match="there are no images"):
        vitkern.quantise(model, [])
    with pytest.raises(RuntimeError, match="float64"):
        vitkern.quantise(model.double())
    assert model.precision is None


# ---- files ----


@pytest.mark.parametrize("option", ["plain", "qk-norm", "head-token-norm", "odd-sizes"])
def test_a_file_keeps_the_bits(option, tmp_path):
    pytest.importorskip("safetensors")
    model = tiny(**OPTIONS[option])
    model.precision, image = "int8", picture(model)
    file = tmp_path / "model.safetensors"
    vitkern.save_packed(model, file)
    loaded = vitkern.load_packed(file)
    assert loaded.config == model.config and not loaded.training
    copied = copy.deepcopy(loaded)
    with torch.inference_mode():
        want = model(image)
        assert torch.equal(loaded(image), want)
        assert torch.equal(copied(image), want)
        vitkern.save_packed(loaded, tmp_path / "again.safetensors")
        assert torch.equal(vitkern.load_packed(tmp_path / "again.safetensors")(image), want)
    loaded.restore_weights(rounded=True)
    with torch.inference_mode():
        assert torch.equal(loaded(image), want), "of the file's integers"
        loaded.precision = "fp32"
        assert 0 < Error.of(loaded(image), want).rms < 0.1
    with torch.no_grad():
        loaded.blocks[0].mlp.fc2.weight.mul_(2)
    loaded.precision = "int8"
    with torch.inference_mode():
        assert not torch.equal(loaded(image), want)


def test_a_file_is_read_without_its_floats(tmp_path, monkeypatch):
    """Neither reading, a forward, nor writing again makes floats of the integers."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    model, file = tiny(separate_qkv=True), tmp_path / "model.safetensors"
    model.precision, image = "int8", picture(model)
    vitkern.save_packed(model, file)
    with torch.inference_mode():
        want = model(image)

    def refuse(*_):
        raise AssertionError("made floats")

    monkeypatch.setattr(int8.Quantised, "values", refuse)
    monkeypatch.setattr(int8, "quantise_weight", refuse)
    loaded = vitkern.load(file)
    matrices = {n: p for n, p in loaded.named_parameters() if int8.is_matrix(n, p)}
    assert len(matrices) == 6 * model.config.depth and all(p.is_meta for p in matrices.values())
    with torch.inference_mode():
        assert torch.equal(loaded(image), want)
    vitkern.save_packed(loaded, tmp_path / "again.safetensors")
    one, two = load_file(file), load_file(tmp_path / "again.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    floats = sum(p.nbytes for n, p in model.named_parameters() if n not in matrices)
    integers = sum(p.numel() + 4 * len(p) for p in matrices.values())
    assert loaded.weight_bytes()["parameters"] == floats + integers


def test_quantise_refuses_a_model_without_its_floats():
    model = tiny()
    model.precision = "int8"
    model.release_weights()
    with pytest.raises(RuntimeError, match=r"quantise's report needs the weights.*rounded=True"):
        vitkern.quantise(model, picture(model))
    assert model.precision == "int8"


def test_a_file_has_a_quarter_of_the_size(tmp_path):
    pytest.importorskip("safetensors")
    model = tiny(width=256, heads=4, mlp_width=1024)
    file = tmp_path / "model.safetensors"
    vitkern.save_packed(model, file, "int8")
    assert file.stat().st_size < 0.28 * sum(p.nbytes for p in model.parameters())


def test_refuses_files_of_others(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model, file = tiny(), tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        vitkern.load_packed(file)
    file.write_bytes(b"not a model" * 10)
    with pytest.raises(ValueError, match="damaged or not safetensors"):
        vitkern.load_packed(file)
    save_file(dict(model.state_dict()), file)
    with pytest.raises(ValueError, match=r"not written by save_packed.*vitkern\.load"):
        vitkern.load_packed(file)
    vitkern.save_packed(model, file, "int8")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="damaged or not safetensors"):
        vitkern.load_packed(file)
    from safetensors import safe_open

    file.write_bytes(whole)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
        good = {name: opened.get_tensor(name) for name in opened.keys()}
    name = "blocks.0.attn.qkv.weight"
    bad = {
        "lacks blocks.0.attn.qkv.weight": {k: v for k, v in good.items() if k != name},
        "qkv.weight is .*int8.*expected": {**good, name: good[name][:-1].contiguous()},
        "float32.*expected.*int8": {**good, name: good[name].float()},
        "has extra, which": {**good, "extra": torch.ones(1)},
    }
    for message, tensors in bad.items():
        save_file(tensors, file, about)
        with pytest.raises(ValueError, match=message):
            vitkern.load_packed(file)
    for config in ("", "{", '{"width": -3}', '{"nothing": 1}', "[]"):
        save_file(good, file, {**about, "config": config})
        with pytest.raises(ValueError, match="no usable configuration"):
            vitkern.load_packed(file)
    with pytest.raises(TypeError, match="save_packed: expected a vitkern"):
        vitkern.save_packed(torch.nn.Linear(2, 2), file)
    with pytest.raises(ValueError, match=r"save_packed: .*float64"):
        vitkern.save_packed(tiny().double(), file)
