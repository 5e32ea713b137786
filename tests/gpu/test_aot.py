"""The ahead-of-time build: what it writes, what it survives, what is on its list."""

import dataclasses
import hashlib
import json
import sys

import pytest

pytest.importorskip("triton")
import triton

from tests.gpu.aot_kernels import matmul_variant, plain_variant, refused
from vitkern.__main__ import main
from vitkern.engines import trace as aot_list
from vitkern.gpu.aot import build as aot
from vitkern.gpu.aot import folder as aot_folder

ARCHS = ("sm_80", "sm_90", "sm_120", "gfx942")


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory):
    """A cache of Triton's for these tests alone: they compile, and then they do not."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of `vitkern aot`."""
    try:
        status = main(["aot", *map(str, arguments)])
    except SystemExit as stop:  # argparse's own errors
        status = stop.code
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def few(monkeypatch):
    """`vitkern aot` builds two kernels instead of the models'."""
    monkeypatch.setattr(
        aot_list, "variants", lambda arch, *_: [matmul_variant(arch), plain_variant(arch)]
    )


# ---- the folder ----


def test_build_writes_binaries_and_a_complete_manifest(capsys, few, tmp_path):
    arguments = ("--arch", ",".join(ARCHS), "--out", tmp_path / "out", "--jobs", 1)
    status, out, err = run(capsys, *arguments)
    assert status == 0, out + err
    assert "8 kernels" in out and "8 compiled" in out and "0 failed" in out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["triton"] == triton.__version__
    assert len(manifest["kernels"]) == 8
    for entry in manifest["kernels"]:
        content = (tmp_path / "out" / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert len(content) == entry["bytes"]
        assert entry["kernel"].encode() in content
        assert entry["warp_size"] == (64 if entry["arch"] == "gfx942" else 32)
        assert entry["global_scratch"] == entry["profile_scratch"] == [0, 1]
        assert entry["hidden_parameters"] == 2, "Triton's two pointers, by the compiled kernel"
        assert not list((tmp_path / "out").glob("**/.*")), "temporary files are left"
    (entry,) = (e for e in manifest["kernels"] if (e["kernel"], e["arch"]) == ("matmul", "sm_80"))
    variant = matmul_variant("sm_80")
    assert entry["id"] == variant.name
    assert (entry["num_warps"], entry["num_stages"]) == (4, 3)
    assert entry["shared"] > 0
    assert entry["arguments"] == [
        *([name, "*bf16", True] for name in ("x", "w", "bias", "y")),
        ["M", "i32", False],  # varies from call to call: nothing is promised
        *([name, "i32", True] for name in ("N", "K", "x_stride")),
    ]
    assert entry["constants"] == {"PRECISION": "tf32", "BM": 128, "BN": 128, "BK": 32}

    status, out, _ = run(capsys, *arguments)  # nothing has changed
    assert status == 0
    assert "0 compiled and 8 there already" in out
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest


def test_build_adds_to_earlier_ones_and_drops_what_is_old(tmp_path):
    first, second = plain_variant("sm_80"), plain_variant("sm_90")
    aot.build({"sm_80": [first]}, tmp_path, jobs=1)
    result = aot.build({"sm_90": [second]}, tmp_path, jobs=1)
    assert (result.built, result.kept) == (1, 1)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    (old,) = (entry for entry in manifest["kernels"] if entry["arch"] == "sm_80")
    old["source"] = "another kernel's"
    path.write_text(json.dumps(manifest))
    assert aot.build({"sm_90": [second]}, tmp_path, jobs=1).kept == 0
    assert not (tmp_path / old["file"]).exists()


@pytest.mark.parametrize("damage", ["binary", "missing", "manifest", "fields"])
def test_build_mends_a_damaged_folder(tmp_path, damage):
    variants = {"sm_80": [plain_variant("sm_80")]}
    (entry,) = aot.build(variants, tmp_path, jobs=1).entries
    path, manifest = tmp_path / entry["file"], tmp_path / "manifest.json"
    if damage == "binary":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "missing":
        path.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:50])
    else:
        manifest.write_text('{"vitkern": "0", "triton": "1", "kernels": [{"file": 3}]}')
    result = aot.build(variants, tmp_path, jobs=1)
    assert result.built == 1 and not result.failures
    assert aot_folder.is_there(tmp_path, aot_folder.read(tmp_path)[0])


def test_build_never_touches_files_outside_its_folder(tmp_path):
    outside = tmp_path / "precious"
    outside.write_text("kept")
    folder = tmp_path / "out"
    (entry,) = aot.build({"sm_80": [plain_variant("sm_80")]}, folder, jobs=1).entries
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["kernels"][0]["file"] = "../precious"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    aot.build({"sm_80": [plain_variant("sm_80")]}, folder, jobs=1)
    assert outside.read_text() == "kept"
    assert (folder / entry["file"]).is_file()


def test_tritons_own_cache_may_be_damaged(triton_cache):
    variant = plain_variant("sm_90")
    code = aot.compile_variant(variant, "sm_90").code
    (cached,) = (p for p in triton_cache.glob("**/scaled.cubin") if p.read_bytes() == code)
    cached.write_bytes(code[: len(code) // 2])
    assert aot.compile_variant(variant, "sm_90").code == code
    for text in cached.parent.glob("*.json"):
        text.write_text("{")
    assert aot.compile_variant(variant, "sm_90").code == code


def test_an_interrupted_build_leaves_the_earlier_one_whole(tmp_path):
    aot.build({"sm_80": [plain_variant("sm_80")]}, tmp_path, jobs=1)
    before = (tmp_path / "manifest.json").read_bytes()

    def interrupt(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        variants = {"sm_80": [plain_variant("sm_80")], "sm_90": [plain_variant("sm_90")]}
        aot.build(variants, tmp_path, jobs=1, progress=interrupt)
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert all(aot_folder.is_there(tmp_path, entry) for entry in aot_folder.read(tmp_path))


def test_an_interrupted_build_has_said_what_it_found(tmp_path):
    heard = []

    def interrupt(one):
        heard.append(one)
        raise KeyboardInterrupt

    variants = {"sm_80": [plain_variant("sm_80")], "sm_90": [plain_variant("sm_90")]}
    with pytest.raises(KeyboardInterrupt):
        aot.build(variants, tmp_path, jobs=1, analyse=True, verdict=interrupt)
    assert [one.report.arch for one in heard] == ["sm_80"]


def test_a_kernel_that_fails_does_not_stop_the_others(capsys, monkeypatch, tmp_path):
    def variants(arch, *_):
        return [plain_variant(arch, refused), plain_variant(arch)]

    monkeypatch.setattr(aot_list, "variants", variants)
    status, out, _ = run(capsys, "--arch", "sm_80", "--out", tmp_path, "--jobs", 1)
    assert status == 1
    assert "FAILED sm_80 refused" in out and "this kernel never compiles" in out
    assert "1 kernels" in out and "1 failed" in out
    assert [entry["kernel"] for entry in aot_folder.read(tmp_path)] == ["scaled"]


def test_kernels_that_are_gated_together_fail_by_themselves(tmp_path, monkeypatch):
    """One that does not compile, one whose binary nvdisasm cannot read, and one that is right."""
    cut = aot.compile_variant(plain_variant("sm_80"), "sm_80")._replace(code=b"no cubin")
    right = aot.compile_variant

    def compiled(variant, arch):
        return cut if variant.num_warps == 8 else right(variant, arch)

    monkeypatch.setattr(aot, "compile_variant", compiled)
    good = plain_variant("sm_80")
    several = plain_variant("sm_80", refused), dataclasses.replace(good, num_warps=8), good
    tasks = [
        aot._task(one, "sm_80", str(i) * 64, str(tmp_path), True) for i, one in enumerate(several)
    ]
    assert aot._together(tasks, jobs=1) == [tasks]
    first, second, third = aot._work(tasks)
    assert "this kernel never compiles" in first.failure.reason
    assert "cannot read this binary" in second.failure.reason and second.checked is None
    assert third.failure is None and third.checked.broken == []


@pytest.mark.full
def test_workers_survive_a_compiler_that_dies(tmp_path, monkeypatch):
    """Two processes; the module of one kernel ends its process, as a crash inside LLVM would."""
    (tmp_path / "dying_kernel.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    good = aot._task(plain_variant("sm_80"), "sm_80", "0" * 64, str(tmp_path / "out"), True)
    bad = good._replace(id="bad", function="dying_kernel:kernel", key="1" * 64)
    done = dict(aot._run_all([bad, good, good._replace(key="2" * 64)], jobs=2))
    assert done[bad].failure == aot.Failure("bad", "sm_80", "the compiler crashed")
    assert done[good].failure is None
    assert (tmp_path / "out" / done[good].entry["file"]).is_file()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--arch", "sm_75", "--out", "x"), "unknown architecture sm_75: choose from sm_80,"),
        (("--arch", "", "--out", "x"), "no architecture"),
        (("--dtype", "fp8", "--out", "x"), "unknown dtype 'fp8'; known: fp32,"),
        (("--models", "Q/16", "--arch", "sm_80", "--out", "x"), "unknown variant"),
        (("--jobs", "0", "--out", "x"), "no number of processes"),
        ((), "--out"),
    ],
)
def test_aot_refuses(capsys, arguments, said):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert said in err and "Traceback" not in err


def test_aot_says_that_a_folder_cannot_be_written(capsys, few, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run(capsys, "--arch", "sm_80", "--out", tmp_path / "file" / "out")
    assert status == 2
    assert "cannot write to" in err and "choose another folder" in err


def test_aot_without_triton_says_how_to_get_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "triton", None)
    status, _, err = run(capsys, "--arch", "sm_80", "--out", tmp_path)
    assert status == 2
    assert "pip install 'vitkern[gpu]'" in err


# ---- the list ----


def test_list_has_every_operator_of_a_model_once():
    found = aot_list.variants("sm_80", ("bf16",), ("Ti/16",))
    assert len({variant.name for variant in found}) == len(found)
    modules = {variant.kernel.fn.__module__.rpartition(".")[2] for variant in found}
    assert {"attention", "layernorm", "linear_residual", "norm_linear", "patch_embed"} <= modules
    inference = aot_list.variants("sm_80", ("bf16",), ("Ti/16",), backward=False)
    assert 0 < len(inference) < len(found)


def test_list_follows_precision_and_architecture():
    names = {
        (arch, precision): {
            v.name for v in aot_list.variants(arch, (precision,), ("Ti/16",), False)
        }
        for arch in ("sm_80", "gfx942")
        for precision in ("fp32", "tf32")
    }
    assert any("tf32x3" in name for name in names["sm_80", "fp32"])
    assert not any("tf32x3" in name for name in names["sm_80", "tf32"])
    assert all("tf32" not in name for name in names["gfx942", "fp32"])


def test_every_source_of_launches_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(aot_list, "SOURCES", [lambda case, recorder: asked.append(case)])
    assert aot_list.variants("sm_80", ("bf16",), ("Ti/16",)) == []
    assert {case.training for case in asked} == {False, True}
    assert {case.images for case in asked} == set(aot_list.IMAGES)
