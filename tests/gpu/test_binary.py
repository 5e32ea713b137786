"""Folders of compiled kernels, and launches from them through the C++ launcher."""

import json
import weakref

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.evidence.interpreter import Interpreter
from vitkern import _C
from vitkern.gpu import layernorm
from vitkern.gpu.launch import Recorder, executing
from vitkern.gpu.runtime.binary import BinaryError, BinaryExecutor, Store
from vitkern.gpu.runtime.cache import Cache
from vitkern.gpu.runtime.plan import Plan


@pytest.fixture
def operands():
    return sample.affine_operands()


@pytest.fixture
def launch(operands):
    x, bias, y = operands
    return sample.affine_launch(x, y, bias)


@pytest.fixture
def folder(tmp_path, launch):
    sample.write_store(tmp_path, [launch], "sm_80", "sm_90")
    return tmp_path


def executor_of(fake, folder, launches, arch="sm_80", memory="cpu"):
    for one in launches:
        v = one.variant
        image = sample.image_of(v, arch)
        fake.register(image, v.kernel, sample.arguments_of(v), dict(v.constants))
    driver = _C.Driver("cuda", fake.path)
    where = torch.device(memory)
    return BinaryExecutor(Store(folder), 0, arch, driver, stream=lambda: 0, memory=where)


def edit(folder, **changes):
    """Change fields of the first kernel in the manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["kernels"][0].update(changes)
    path.write_text(json.dumps(manifest))


# ---- Folders ---------------------------------------------------------------------


def test_store_finds_binaries_by_variant_and_architecture(folder, launch):
    store = Store(folder)
    assert (len(store), store.archs) == (2, ("sm_80", "sm_90"))
    entry = store.find(launch.variant, "sm_90")
    assert (entry.id, entry.arch, entry.kernel) == (launch.variant.name, "sm_90", "affine")
    assert entry.image() == sample.image_of(launch.variant, "sm_90")
    assert store.find(launch.variant, "sm_86") is None
    store.verify()


@pytest.mark.parametrize(
    "device, arch",
    [
        *[("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_87", "sm_86"), ("sm_89", "sm_86")],
        *[
            ("sm_90", "sm_90"),
            ("sm_75", None),
            ("sm_100", None),
            ("sm_121", None),
            ("gfx942", None),
        ],
    ],
)
def test_store_chooses_what_a_device_runs(tmp_path, launch, device, arch):
    sample.write_store(tmp_path, [launch], "sm_80", "sm_86", "sm_90", "sm_120")
    assert Store(tmp_path).arch_for(device) == arch


def test_other_promises_are_other_binaries(folder, operands):
    x = torch.randn(10, 49)[:, 1:]
    assert Store(folder).find(sample.affine_launch(x, operands[2]).variant, "sm_80") is None


@pytest.mark.parametrize("size", [0, 1, 100, -2])
def test_damaged_manifests_are_refused(folder, size):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:size])
    with pytest.raises(BinaryError, match=r"manifest.json is damaged or cut short.*build again"):
        Store(folder)


@pytest.mark.parametrize("text", ["[]", "{}", '{"vitkern": "1", "triton": "3", "kernels": {}}'])
def test_manifests_of_something_else_are_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BinaryError, match=r"manifest.json has no '\w+' of type"):
        Store(folder)


def test_missing_folders_are_refused(tmp_path):
    with pytest.raises(BinaryError, match=r"no folder of compiled kernels: manifest.json cannot"):
        Store(tmp_path / "nonesuch")


@pytest.mark.parametrize("scratch", ["global_scratch", "profile_scratch"])
def test_binaries_that_need_scratch_memory_are_refused(folder, scratch):
    edit(folder, **{scratch: [128, 16]})
    with pytest.raises(BinaryError, match=f"affine-.* needs 128 bytes of {scratch}"):
        Store(folder)


def test_missing_and_damaged_files_are_refused(folder, launch):
    store = Store(folder)
    entry = store.find(launch.variant, "sm_80")
    image = entry.file.read_bytes()
    for wrong in (b"", image[:1000], image[:-1] + b"?"):
        entry.file.write_bytes(wrong)
        with pytest.raises(BinaryError, match=f"SHA-256 differs, {len(wrong)} bytes"):
            store.verify()
    entry.file.unlink()
    with pytest.raises(BinaryError, match=r"cannot be read .*: build again"):
        entry.image()


# ---- Launches --------------------------------------------------------------------


def test_executor_runs_launches(fake, folder, launch, operands):
    x, bias, y = operands
    executor = executor_of(fake, folder, [launch])
    assert executor.has(launch)
    executor.run(launch)
    executor.run(launch)
    torch.testing.assert_close(y, sample.affine_expected(x, bias))
    assert len(fake.executed) == 2 and fake.journal().count("cuModuleLoadData") == 1


def test_executor_names_a_missing_binary(fake, folder, operands):
    x, _, y = operands
    launch = sample.affine_launch(x, y)
    executor = executor_of(fake, folder, [])
    assert not executor.has(launch)
    with pytest.raises(LookupError, match=r"no binary for affine-.* on sm_80 .* has 2 binaries"):
        executor.run(launch)


def test_tensors_of_another_device_are_refused(fake, folder, launch):
    executor = executor_of(fake, folder, [launch], memory="cuda:0")
    with pytest.raises(ValueError, match="x is on cpu, but the kernel runs on cuda:0"):
        executor.run(launch)


def test_manifest_must_describe_the_launch(fake, folder, launch):
    arguments = sample.arguments_of(launch.variant)
    edit(folder, arguments=[("x", "*bf16", True), *arguments[1:]])
    with pytest.raises(BinaryError, match=r"takes .*bf16.* but it is launched with .*build again"):
        executor_of(fake, folder, [launch]).run(launch)


def test_layernorm_through_the_launcher_equals_the_interpreter(fake, tmp_path):
    """An operator of vitkern's own, with launches as its launcher makes them."""
    x, weight, bias = torch.randn(7, 96), torch.randn(96), torch.randn(96)

    def forward(executor):
        results = [torch.zeros(7, 96), torch.zeros(7, 2)]
        with executing(executor):
            layernorm.forward({"M": 7, "D": 96}, results, x, weight, bias, 1e-6, True)
        return results

    recorder = Recorder("sm_80")
    forward(recorder)
    sample.write_store(tmp_path, recorder.launches, "sm_80")
    through_launcher = forward(executor_of(fake, tmp_path, recorder.launches))
    interpreted = forward(Interpreter())
    assert fake.executed
    for ours, wanted in zip(through_launcher, interpreted, strict=True):
        assert torch.equal(ours, wanted) and wanted.any()


# ---- Plans -----------------------------------------------------------------------


def two_launches(x, y):
    middle, bias = torch.zeros(10, 48), torch.randn(48)
    return sample.affine_launch(x, middle, bias), sample.affine_launch(middle, y), bias


@pytest.mark.parametrize("native", [True, False], ids=["one call", "launch by launch"])
def test_plan_follows_its_slots(fake, tmp_path, operands, native):
    x, _, y = operands
    first, second, bias = two_launches(x, y)
    sample.write_store(tmp_path, [first, second], "sm_80")
    executor = executor_of(fake, tmp_path, [first, second]) if native else Interpreter()
    plan = Plan(executor, [first, second], [x, y])
    assert (plan.one_call, plan.count) == (native, 2)
    for _ in range(2):
        x, y = torch.randn(10, 48), torch.zeros(10, 48)
        plan.run(x, y)
        wanted = sample.affine_expected(sample.affine_expected(x, bias))
        torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("missing", range(4))
def test_plan_compiles_what_has_no_binary(fake, tmp_path, operands, missing):
    """One missing binary costs a compilation: the plan stays one C++ call."""
    x, _, y = operands
    between, biases = torch.zeros(3, 10, 48), torch.randn(4, 48)
    ends = list(zip((x, *between), (*between, y), strict=True))
    launches = [sample.affine_launch(*e, b) for e, b in zip(ends, biases, strict=True)]
    # Of the same kernel, but its pointer promises nothing, so that it is another variant.
    odd = torch.empty(10 * 48 + 1)[1:].view(10, 48)
    if missing < 3:
        launches[missing] = sample.affine_launch(ends[missing][0], odd, biases[missing])
        launches[missing + 1] = sample.affine_launch(odd, ends[missing + 1][1], biases[missing + 1])
    else:
        launches[3] = sample.affine_launch(between[2], y, None)
        biases[3] = 0
    lost = {missing, missing + 1} & set(range(4))
    built = [one for i, one in enumerate(launches) if i not in lost]
    sample.write_store(tmp_path, built, "sm_80")
    executor = executor_of(fake, tmp_path, built)
    executor.cache = Cache("sm_80", tmp_path / "cache")
    for i in lost:
        v = launches[i].variant
        entry = executor.cache.compile(v)
        fake.register(entry.code, v.kernel, entry.arguments, dict(v.constants))
    plan = Plan(executor, launches, [x, y])
    assert plan.one_call and plan.count == 4
    variants = [{launches[i].variant for i in which} for which in (set(range(4)) - lost, lost)]
    assert list(executor.loaded.values()) == list(map(len, variants))
    before = len(fake.journal())
    for _ in range(2):
        x, y = torch.randn(10, 48), torch.zeros(10, 48)
        plan.run(x, y)
        wanted = x
        for bias in biases:
            wanted = sample.affine_expected(wanted, bias)
        torch.testing.assert_close(y, wanted)
    launched = [line for line in fake.journal()[before:] if line == "cuLaunchKernel"]
    assert len(launched) == executor.launched == 2 * 4


def test_plan_keeps_what_is_in_no_slot(fake, folder, operands):
    x, bias, y = operands
    kept = bias.clone()
    launch, alive = sample.affine_launch(x, y, kept), weakref.ref(kept)
    plan = Plan(executor_of(fake, folder, [launch]), [launch], [y])
    del launch, kept
    assert alive() is not None
    plan.run(y)
    torch.testing.assert_close(y, sample.affine_expected(x, bias))


def test_plan_refuses_other_layouts(fake, folder, launch, operands):
    x, _, y = operands
    plan = Plan(executor_of(fake, folder, [launch]), [launch], [x, y])
    for wrong in (x[:5], x.bfloat16(), torch.randn(48, 10).T):
        with pytest.raises(ValueError, match="the plan was made for"):
            plan.run(wrong, y)
    with pytest.raises(ValueError, match="starts 4 bytes after a multiple of 16"):
        plan.run(torch.randn(481)[1:].view(10, 48), y)


def test_plan_refuses_slots_that_nothing_uses(fake, folder, launch, operands):
    with pytest.raises(ValueError, match=r"no launch of the plan uses slots \[1\]"):
        Plan(executor_of(fake, folder, [launch]), [launch], [operands[0], torch.zeros(3)])
