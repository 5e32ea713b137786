"""Folders of compiled kernels that were not written by the build: errors, and nothing is lost."""

import json
import os
import pathlib

import pytest

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.gpu.aot_kernels import plain_variant
from vitkern.gpu.aot import build as aot
from vitkern.gpu.aot import folder as aot_folder
from vitkern.gpu.runtime.binary import BinaryError, Store


@pytest.fixture
def folder(tmp_path):
    """One binary and its manifest, beside a file that is not the folder's."""
    x, bias, y = sample.affine_operands()
    (tmp_path / "out").mkdir()
    sample.write_store(tmp_path / "out", [sample.affine_launch(x, y, bias)], "sm_80")
    (tmp_path / "precious").write_text("kept")
    return tmp_path / "out"


def entries(folder):
    return json.loads((folder / "manifest.json").read_text())["kernels"]


def write(folder, kernels):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "kernels": kernels}))


def edit(folder, **changes):
    write(folder, [{**entries(folder)[0], **changes}])


def everything(folder):
    """What is in a folder and beside it."""
    return {p: p.is_file() and p.read_bytes() for p in sorted(folder.parent.rglob("*"))}


# ---- What a manifest says ----------------------------------------------------------


WRONG = {
    "id": [None, 3, "", ["a"], "a\n"],
    "kernel": [None, "", "affine\0", "../affine", 3],
    "arch": [None, "", "sm_", "sm_80/..", 80],
    "sha256": [None, "", "0" * 63, "G" * 64],
    "num_warps": [None, 0, -1, 2**64, 1025, 4.0, "4", True, [4]],
    "warp_size": [0, 2**31],
    "num_stages": [-1, "3"],
    "shared": [-1, 2**31, 1e300, None],
    "hidden_parameters": [-1, 17, 2.0, None],
    "arguments": [None, "x", {}, [["x"]], ["abc"], [["x", "*fp32", 1]], [[1, "*fp32", True]]],
    "constants": [None, 3, "ab", [["BM", 4]], {"BM": [4]}, {"BM": {}}],
    "global_scratch": [None, [], "00", [0], [0.0, 1], {"0": 0}],
    "profile_scratch": [0, [0, 1, 2]],
    "file": [
        None, 3, "", ".", "..", "/", "manifest.json", "sm_80", "sm_80/", "sm_80/.", "sm_80/..",
        "../precious", "sm_80/../manifest.json", "sm_80/.affine-0123456789abcdef.cubin",
        "sm_80/affine-0123456789abcdef.bin", "sm_80/a/affine-0123456789abcdef.cubin",
        "sm_90/affine-0123456789abcdef.cubin", "sm_80/affine-0123456789abcdef.cubin\n",
        "/sm_80/affine-0123456789abcdef.cubin", ["sm_80"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_fields_that_no_build_writes_are_refused(folder, field):
    before = entries(folder)[0]
    for value in WRONG[field]:
        write(folder, [{**before, field: value}])
        with pytest.raises(BinaryError, match=r"describes kernel .* wrongly .*: build again"):
            Store(folder)
    write(folder, [{name: value for name, value in before.items() if name != field}])
    with pytest.raises(BinaryError, match=f"wrongly .it has no '{field}'.: build again"):
        Store(folder)


@pytest.mark.parametrize("entry", [None, 3, "kernel", [], ["id"]], ids=str)
def test_entries_that_are_no_objects_are_refused(folder, entry):
    write(folder, [entry])
    with pytest.raises(BinaryError, match=r"describes kernel \? wrongly"):
        Store(folder)


def test_a_kernel_that_is_listed_twice_is_refused(folder):
    write(folder, entries(folder) * 2)
    with pytest.raises(BinaryError, match=r"lists kernel affine-.* for sm_80 twice: build again"):
        Store(folder)


TEXTS = {
    "infinity": '{"vitkern": "1", "triton": "3", "kernels": [Infinity]}',
    "nan": '{"vitkern": "1", "triton": "3", "kernels": [NaN]}',
    "deep": '{"vitkern": "1", "triton": "3", "kernels": ' + "[" * 100_000,
    "long number": '{"vitkern": "1", "triton": "3", "kernels": [' + "9" * 10_000 + "]}",
}


@pytest.mark.parametrize("what", TEXTS)
def test_manifests_that_are_no_json_are_refused(folder, what):
    (folder / "manifest.json").write_text(TEXTS[what])
    with pytest.raises(BinaryError, match=r"manifest.json is damaged or cut short .*: build again"):
        Store(folder)
    assert aot_folder.read(folder) == []


def test_nested_values_are_refused_without_being_followed(folder):
    """A value may be nested just as deeply as JSON can be read: it is not printed."""
    text = json.dumps({"vitkern": "1", "triton": "3", "kernels": [{"id": 7}]})
    for depth in range(900, 1000):
        nested = "[" * depth + "]" * depth
        (folder / "manifest.json").write_text(text.replace("7", nested))
        with pytest.raises(BinaryError, match="build again"):
            Store(folder)


# ---- Files -------------------------------------------------------------------------


def test_enormous_files_are_refused_unread(folder):
    binary = folder / entries(folder)[0]["file"]
    os.truncate(binary, 1 << 36)  # takes no room on the disk
    with pytest.raises(BinaryError, match=r"cannot be read .*68719476736 bytes, more than"):
        Store(folder).verify()
    os.truncate(folder / "manifest.json", 1 << 36)
    with pytest.raises(BinaryError, match=r"manifest.json cannot be read .*more than"):
        Store(folder)
    assert aot_folder.read(folder) == []


def test_binaries_that_are_no_files_are_refused(folder):
    binary = folder / entries(folder)[0]["file"]
    copy = binary.rename(folder / "copy")
    ways = [binary.mkdir, lambda: binary.symlink_to(copy), lambda: os.mkfifo(binary)]
    for make, remove in zip(ways, (binary.rmdir, binary.unlink, binary.unlink), strict=True):
        make()
        with pytest.raises(BinaryError, match=r"cannot be read .*no regular file"):
            Store(folder).verify()
        remove()


def test_binaries_behind_a_link_are_refused(folder):
    (folder / "sm_80").rename(folder / "elsewhere")
    (folder / "sm_80").symlink_to(folder / "elsewhere", target_is_directory=True)
    with pytest.raises(BinaryError, match="sm_80 is a symbolic link"):
        Store(folder)


def test_the_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    Store(tmp_path / "link").verify()


# ---- The build ---------------------------------------------------------------------


@pytest.mark.parametrize("file", [f for f in WRONG["file"] if isinstance(f, str)], ids=repr)
def test_build_removes_nothing_that_it_cannot_have_written(folder, file):
    edit(folder, file=file)
    before = everything(folder)
    aot_folder.finish(folder, [])
    assert entries(folder) == []
    before[folder / "manifest.json"] = (folder / "manifest.json").read_bytes()
    assert everything(folder) == before


def test_build_removes_nothing_behind_a_link(folder, tmp_path):
    name = pathlib.PurePath(entries(folder)[0]["file"]).name
    (folder / "sm_80").rename(tmp_path / "foreign")
    (folder / "sm_80").symlink_to(tmp_path / "foreign", target_is_directory=True)
    aot_folder.finish(folder, [])
    assert (tmp_path / "foreign" / name).is_file()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_build_removes_regular_files_only(folder, tmp_path, kind):
    path = folder / entries(folder)[0]["file"]
    path.unlink()
    if kind == "link":
        path.symlink_to(tmp_path / "precious")
    else:
        path.mkdir()
    aot_folder.finish(folder, [])
    assert os.path.lexists(path) and (tmp_path / "precious").read_text() == "kept"


def test_build_removes_what_an_earlier_one_wrote(folder):
    path = folder / entries(folder)[0]["file"]
    aot_folder.finish(folder, [])
    assert not path.exists()


def test_build_refuses_a_link_or_a_file_in_the_place_of_its_folders(folder, tmp_path):
    variants = {"sm_90": [plain_variant("sm_90")]}
    (folder / "sm_90").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(OSError, match="sm_90 must be a folder, not a link"):
        aot.build(variants, folder, jobs=1)
    (folder / "sm_90").unlink()
    (folder / "sm_90").write_text("")
    with pytest.raises(OSError, match="sm_90 must be a folder, not a link or a file"):
        aot.build(variants, folder, jobs=1)
    (folder / "sm_90").unlink()
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    with pytest.raises(OSError, match=r"manifest.json must be a file"):
        aot.build(variants, folder, jobs=1)


def whole(folder, **changes):
    """A manifest of this version, with what the next build needs of an entry."""
    entry = {**entries(folder)[0], "key": "k", "function": "a:b", "source": "", "bytes": 1}
    manifest = {"vitkern": aot_folder.version(), "triton": aot_folder.triton.__version__}
    text = json.dumps({**manifest, "kernels": [{**entry, **changes}]})
    (folder / "manifest.json").write_text(text)


def test_build_takes_over_only_what_it_knows(folder):
    whole(folder, surprise=["deep"])
    (kept,) = aot_folder.read(folder)
    assert kept["key"] == "k" and "surprise" not in kept
    for field in ("key", "function", "source", "bytes", "shared", "hidden_parameters", "file"):
        for value in (None, [], -1, 10**400):
            whole(folder, **{field: value})
            assert aot_folder.read(folder) == []


def test_build_imports_no_module_that_a_manifest_names(folder, tmp_path, monkeypatch):
    (tmp_path / "surprise.py").write_text("raise SystemExit('this must not run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for function in ("surprise:kernel", "os:system", ":", "", "vitkern.gpu.nonesuch:x"):
        whole(folder, function=function)
        assert not aot.is_current(aot_folder.read(folder)[0])
