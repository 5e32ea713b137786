"""The package vitkern-kernels: built by `vitkern aot --package`, installed, found, or refused."""

import json
import os
import subprocess
import sys
import types
import warnings

import pytest

pytest.importorskip("triton")
import torch
import triton

from tests.evidence.fake_cuda import fake_cuda
from vitkern import _C, explanation
from vitkern.__main__ import main
from vitkern.doctor import graphics
from vitkern.engines import trace
from vitkern.gpu import layernorm, manifest
from vitkern.gpu.launch import Recorder, executing
from vitkern.gpu.runtime import binary, device, lookup
from vitkern.gpu.runtime.binary import BinaryError, BinaryExecutor


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing was chosen and nothing looked up; what a test imports is forgotten after it."""
    monkeypatch.setattr(device, "_folder", None)
    monkeypatch.setattr(device, "_executors", {})
    monkeypatch.delenv(lookup.FOLDER, raising=False)
    properties = types.SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(binary, "default_driver", lambda: _C.Driver("cuda", fake_cuda().path))
    lookup.installed.cache_clear()
    yield
    lookup.installed.cache_clear()
    sys.modules.pop(manifest.PACKAGE, None)


@pytest.fixture(scope="module")
def normalise():
    """A launch of one of vitkern's own kernels, and what it computes."""
    x, y = torch.randn(4, 64), torch.zeros(4, 64)
    with executing(Recorder("sm_80")) as recorder:
        layernorm.normalise(x, None, None, y, 1e-6)
    (one,) = recorder.launches
    return one, y, torch.nn.functional.layer_norm(x, (64,), eps=1e-6)


@pytest.fixture(scope="module")
def package(tmp_path_factory, normalise):
    """The folder that `vitkern aot --package` writes, with one kernel."""
    folder = tmp_path_factory.mktemp("package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(trace, "variants", lambda arch, *_: [normalise[0].variant])
        assert main(["aot", "--arch", "sm_80", "--package", str(folder), "--jobs", "1"]) == 0
    return folder


def edit(folder, **changes):
    """The manifest says something else."""
    path = folder / manifest.PACKAGE / "binaries" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def copied(package, tmp_path, monkeypatch):
    """The package where Python finds it, to be changed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in package.rglob("*"):
        target = tmp_path / path.relative_to(package)
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path


# ---- found ----


@pytest.mark.full
def test_a_wheel_is_built_installed_and_launched_from(package, normalise, tmp_path, monkeypatch):
    """In another process, whose path has it, and here on the stand-in driver."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    wheel = (*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path))
    subprocess.run([*wheel, str(package)], check=True)
    (made,) = tmp_path.glob("vitkern_kernels-*-py3-none-any.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), made], check=True)
    binaries = installed / manifest.PACKAGE / "binaries"

    paths = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "vitkern", "doctor", "--json"]
    said = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True, text=True
    )
    assert (
        json.loads(said.stdout)["binaries"]["text"] == f"{binaries} of the package vitkern-kernels"
    )

    monkeypatch.syspath_prepend(str(installed))
    executor = device.executor(torch.device("cuda", 0))
    assert f"binaries of {binaries} for sm_80" in executor.status()
    store = device.binaries().store
    store.verify()
    launch, y, wanted = normalise
    fake = fake_cuda()
    fake.reset(80)
    entry = store.find(launch.variant, "sm_80")
    fake.register(
        entry.image(), launch.variant.kernel, entry.arguments, dict(launch.variant.constants)
    )
    cpu = torch.device("cpu")
    BinaryExecutor(store, 0, "sm_80", stream=lambda: 0, memory=cpu).run(launch)
    torch.testing.assert_close(y, wanted)


def test_an_installed_package_is_found(copied):
    binaries = copied / manifest.PACKAGE / "binaries"
    executor = device.executor(torch.device("cuda", 0))
    assert f"binaries of {binaries} for sm_80" in executor.status()
    assert graphics.binaries()["text"] == f"{binaries} of the package vitkern-kernels"
    model = types.SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    assert str(binaries) in explanation._gpu_kernels(model), "a line of explain()"


def test_without_a_package_there_is_none(monkeypatch):
    found = device.binaries()
    assert found.store is None
    assert found.text == "set VITKERN_BINARIES or install vitkern-kernels"
    assert found.text in device.executor(torch.device("cuda", 0)).status()
    assert graphics.binaries()["text"] == f"none: {found.text}"


def test_the_users_choice_comes_first(copied, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    nothing = {"vitkern": "0", "triton": "0", "kernels": []}
    (other / "manifest.json").write_text(json.dumps(nothing))
    monkeypatch.setenv(lookup.FOLDER, str(other))
    assert device.binaries().store.folder == other
    monkeypatch.setenv(lookup.FOLDER, "")
    assert device.binaries() == (None, "switched off by VITKERN_BINARIES")
    device.use_binaries(other)
    assert device.binaries().store.folder == other
    device.use_binaries(None)
    monkeypatch.setenv(lookup.FOLDER, str(other))
    assert device.binaries() == (None, "switched off")
    with pytest.raises(BinaryError, match=r"manifest.json cannot be read"):
        device.use_binaries(tmp_path / "nowhere")
    assert device.binaries() == (None, "switched off"), "a refused folder is not chosen"


# ---- refused ----


WRONG = {
    "triton": ({"triton": "3.0.0"}, f"Triton 3.0.0, here are .* and {triton.__version__}"),
    "vitkern": ({"vitkern": "9.9"}, "built by vitkern 9.9 and Triton"),
    "sources": ({"sources": "0" * 64}, "from other sources of the kernels"),
    "kernels": ({"kernels": [{"id": "../x"}]}, "describes kernel '../x' wrongly"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_package_that_does_not_fit_is_left_with_a_warning(copied, what):
    changes, reason = WRONG[what]
    edit(copied, **changes)
    with pytest.warns(UserWarning, match=f"vitkern-kernels is not used: .*{reason}"):
        executor = device.executor(torch.device("cuda", 0))
    assert "compiled by Triton at first use (no binaries: vitkern-kernels is not" in (
        executor.status()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device.binaries().store is None, "it is said once"
    assert graphics.binaries()["text"].startswith("none: vitkern-kernels is not used")


@pytest.mark.parametrize("text", ["", "folder = 3", "raise ImportError('half installed')"])
def test_a_package_without_a_folder_is_left_with_a_warning(copied, text):
    (copied / manifest.PACKAGE / "__init__.py").write_text(text)
    with pytest.warns(UserWarning, match="vitkern-kernels is not used"):
        assert device.binaries().store is None


def test_a_replaced_binary_is_refused(copied, normalise):
    (file,) = (copied / manifest.PACKAGE / "binaries").rglob("*.cubin")
    file.write_bytes(b"\x7fELF another")
    store = device.binaries().store
    with pytest.raises(BinaryError, match="SHA-256 differs"):
        store.find(normalise[0].variant, "sm_80").image()


# ---- written ----


def test_a_package_has_its_version_and_no_requirement_but_vitkern(package):
    text = (package / "pyproject.toml").read_text()
    assert 'name = "vitkern-kernels"' in text and f"Triton {triton.__version__}" in text
    (needs,) = (line for line in text.splitlines() if line.startswith("dependencies"))
    assert needs.startswith('dependencies = ["vitkern==') and "," not in needs
    files = {path.name for path in (package / manifest.PACKAGE / "binaries").rglob("*.*")}
    assert "manifest.json" in files and len(files) == 2


def test_a_folder_is_either_plain_or_a_package(capsys, tmp_path):
    for given in ((), ("--out", str(tmp_path), "--package", str(tmp_path))):
        with pytest.raises(SystemExit) as stop:
            main(["aot", *given])
        assert stop.value.code == 2
    assert "--package" in capsys.readouterr().err
