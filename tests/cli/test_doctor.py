"""`vitkern doctor`: facts of this machine, and verdicts on machines that nobody has at hand."""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from vitkern import _C
from vitkern.__main__ import main
from vitkern.doctor import findings, graphics, page, processor, software
from vitkern.doctor.examine import examine
from vitkern.gpu.runtime import eviction
from vitkern.terminal import Paint


@pytest.fixture(scope="module")
def here():
    return examine(seconds=0)


@pytest.fixture
def healthy(here):
    """The facts of a machine without a fault, whatever this one is."""
    facts = copy.deepcopy(here)
    facts["extension"] |= {"problem": "", "newer": []}
    facts["threads"] |= {"mask": 4, "quota": None, "available": 4, "torch": 4, "vitkern": 4}
    facts["processor"] |= {"numa_nodes": 1, "load": 0.0, "cores": 4}
    facts["amx"] = {"state": "absent"}
    facts |= {"forced_set": "", "openmp": ["/lib/libgomp.so.1"], "settings": {}, "gpus": []}
    facts |= {"driver": None, "measured": True, "torch_is_built_for": "cpu"}
    facts["triton"] = {"version": "3.7.1", "problem": ""}
    for name in ("kernel_cache", "binaries"):
        facts[name] = {**facts[name], "problem": ""}
    facts["instruction_sets"] = [
        {"name": n, "base": n, "needs": [], "missing": [], "state": s}
        for n, s in (("avx512", "in use"), ("avx2", "usable"), ("portable", "usable"))
    ]
    facts["versions"]["torch"] = "2.13.0+cpu"
    return facts


def said(facts):
    return [(one.level, one.what, one.remedy) for one in findings.findings(facts)]


# ---- this machine ----


def test_every_instruction_set_of_the_list_has_a_state(here):
    text = (ROOT / "csrc/cpu/isas.inc").read_text()
    names = re.findall(r"^VITKERN_INSTRUCTION_SET\((\w+)", text, re.M)
    assert [row["name"] for row in here["instruction_sets"]] == names
    used = [row["name"] for row in here["instruction_sets"] if row["state"] == "in use"]
    assert used == [_C.features()["isa"]]
    usable = [r["name"] for r in here["instruction_sets"] if r["state"] in page._MARKS]
    assert usable == names


def test_a_set_is_usable_exactly_if_the_dispatcher_lists_it(here):
    able = [
        row["name"]
        for row in here["instruction_sets"]
        if row["state"] in ("in use", "usable", "slower")
    ]
    assert able == _C.isas()
    for row in here["instruction_sets"]:
        assert (row["state"] == "missing") == bool(row["missing"]), row


def test_precisions_are_measured_when_asked(here):
    assert all(row["gflops"] is None for row in here["precisions"].values())
    measured = processor.precisions(here["instruction_set"], seconds=0.001)
    assert measured.keys() == here["precisions"].keys() == {"fp32", "tf32", "bf16", "int8"}
    assert all(row["gflops"] > 0 for row in measured.values())


def test_versions_threads_and_openmp_are_those_of_this_process(here):
    assert here["versions"]["torch"] == torch.__version__
    assert here["threads"]["torch"] == torch.get_num_threads()
    if sys.platform == "linux":
        assert any("omp" in path for path in here["openmp"])


def test_extras_say_what_they_lack(monkeypatch):
    assert {"images", "plots", "train"} <= software.extras().keys()
    assert not {"test", "dev"} & software.extras().keys()
    real = software.version
    monkeypatch.setattr(software, "version", lambda n: None if n == "matplotlib" else real(n))
    lacking = software.extras()
    assert lacking["plots"] == ["matplotlib"]
    assert "matplotlib" in lacking["train"], "an extra that is made of others lacks what they lack"


def test_sources_newer_than_the_extension_are_found(tmp_path):
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    built = tmp_path / "_C.so"
    for when, path in ((100, "csrc/cpu/old.cpp"), (200, "_C.so"), (300, "csrc/cpu/new.cpp")):
        (tmp_path / path).touch()
        os.utime(tmp_path / path, (when, when))
    assert software.newer_sources(tmp_path, built) == ["csrc/cpu/new.cpp"]
    assert software.newer_sources(tmp_path / "csrc", built) == [], "an installed package has none"


def test_the_kernel_cache_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("VITKERN_CACHE", str(tmp_path))
    folder = tmp_path / "3.7.1" / "sm_90"
    folder.mkdir(parents=True)
    (folder / f"forward-{'a' * 16}.json").write_text("{}")
    (folder / f"forward-{'b' * 16}.cubin").write_bytes(b"x" * 98)
    (folder / "notes.txt").write_text("somebody else's")
    assert eviction.contents(tmp_path) == {"3.7.1/sm_90": (1, 100)}
    found = graphics.kernel_cache()
    assert (found["kernels"], found["bytes"]) == ({"3.7.1/sm_90": 1}, 100)
    monkeypatch.setenv("VITKERN_CACHE_SIZE", "much")
    assert "whole number of MiB" in graphics.kernel_cache()["problem"]


# ---- machines that nobody has at hand ----


def test_a_machine_without_a_fault_has_no_findings(healthy):
    assert said(healthy) == []
    assert "Nothing to mend" in page.page(healthy, [], Paint(False))


CASES = {
    "extension": (
        {"extension": {"problem": "no module", "newer": [], "file": None, "package": "p"}},
        "error", "cannot be loaded", "make setup",
    ),
    "stale": (
        {"extension": {"problem": "", "newer": ["csrc/a.cpp", "csrc/b.cpp"]}},
        "warning", "csrc/a.cpp and 1 more changed", "build_ext",
    ),
    "quota": (
        {"threads": {"mask": 64, "quota": 4.0, "available": 4, "torch": 64, "vitkern": 4,
                     "OMP_NUM_THREADS": None}},
        "warning", "a CPU quota of 4 leaves this process 4", "OMP_NUM_THREADS=4",
    ),
    "too many threads": (
        {"threads": {"mask": 2, "quota": None, "available": 2, "torch": 8, "vitkern": 8,
                     "OMP_NUM_THREADS": "8"}},
        "warning", "PyTorch has 8 threads, but affinity leaves", "set_num_threads(2)",
    ),
    "leaf hidden": (
        {"amx": {"state": "works, leaf hidden"}},
        "warning", "hides CPUID leaf 0x1D", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
    ),
    "leaf hidden, tried": (
        {"amx": {"state": "works, leaf hidden"}, "torch_bf16": "dies"},
        "warning", "dies with SIGILL here (tried)", "ONEDNN_MAX_CPU_ISA",
    ),
    "AMX refused": ({"amx": {"state": "refused"}}, "warning", "refuses the tile", "seccomp"),
    "two OpenMPs": (
        {"openmp": ["/a/libgomp.so.1", "/b/libiomp5.so"]},
        "warning", "2 OpenMP runtimes are loaded (/a/libgomp.so.1", "one source",
    ),
    "old Triton": (
        {"triton": {"version": "3.2.0", "problem": "the GPU kernels need Triton 3.4"}},
        "note", "cannot compile the GPU kernels", "vitkern[gpu]",
    ),
    "driver without PyTorch's build": (
        {"driver": "NVIDIA 570"}, "warning", "built for the CPU only", "CUDA or ROCm build",
    ),
    "old torch": (
        {"versions": {"torch": "2.5.1"}}, "warning", "PyTorch 2.5.1 is outside", "torch>=2.6",
    ),
    "old GPU": (
        {"gpus": [{"name": "V100", "capability": [7, 0]}], "torch_is_built_for": "cuda 12.8"},
        "warning", "V100 has compute capability 7.0", "A100",
    ),
    "busy": ({"processor": {"load": 9.0, "cores": 2}}, "note", "load average 9.0", "quiet"),
    "no room": (
        {"kernel_cache": {"problem": "/x cannot be written"}}, "note", "/x cannot", "VITKERN_CACHE",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_with_its_remedy(case, healthy):
    changes, level, what, remedy = CASES[case]
    ((found_level, found_what, found_remedy),) = said({**healthy, **changes})
    assert found_level == level and what in found_what and remedy in found_remedy


def test_onednn_held_below_amx_is_no_fault(healthy):
    changes = {"settings": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}}
    assert said({**healthy, **changes, "amx": {"state": "works, leaf hidden"}}) == []


@pytest.mark.parametrize(
    "forced, states, level, what",
    [
        ("avx2", {"avx512": "usable", "avx2": "in use"}, "warning", "below avx512"),
        ("avx512", {"avx512": "in use"}, None, ""),
        ("mmx", {"avx512": "usable"}, "error", "no such set, but avx512, avx2, portable"),
        ("avx512", {"avx512": "not built", "avx2": "usable"}, "error", "it is not built"),
        ("", {"avx512": "not built", "avx2": "in use"}, "warning", "can run avx512"),
    ],
)
def test_a_forced_or_absent_set_is_judged(forced, states, level, what, healthy):
    for row in healthy["instruction_sets"]:
        row["state"] = states.get(row["name"], row["state"])
    found = said({**healthy, "forced_set": forced})
    if level is None:
        assert not found
    else:
        assert found[0][0] == level and what in found[0][1]


@pytest.mark.parametrize("state", page._AMX)
def test_every_state_can_be_printed(state, healthy):
    facts = {**healthy, "amx": {"state": state}, "extras": {}}
    for row, mark in zip(facts["instruction_sets"], page._MARKS, strict=False):
        row["state"] = mark
    assert page._AMX[state].split(":")[0][:20] in page.page(facts, [], Paint(False))


def test_lines_fit_a_terminal(here):
    found = [findings.Finding("warning", "word " * 60, "word " * 60)]
    lines = page.page(here, found, Paint(False)).splitlines()
    paths = [line for line in lines if len(line) > 100]
    assert all(" " not in line.strip().split("  ")[-1] for line in paths), paths
    assert "\033" not in page.page(here, found, Paint(False))
    assert "\033[33;1m" in page.page(here, found, Paint(True))


# ---- the command ----


def run(capsys, *arguments):
    status = main([str(a) for a in arguments])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.mark.parametrize("name", ("doctor", "info"))
def test_the_page_names_what_runs(name, capsys):
    status, out, _ = run(capsys, name, "--no-measure")
    assert status == 0, out
    for word in (torch.__version__, _C.features()["isa"], "threads", "extension", "GPU", "Triton"):
        assert word in out
    assert "GFLOPS" not in out and "\033" not in out


def test_json_has_facts_and_findings(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert status == 0 and found["versions"]["torch"] == torch.__version__
    assert found["precisions"]["fp32"]["gflops"] > 0
    assert all(set(one) == {"level", "what", "remedy"} for one in found["findings"])


def test_an_impossible_set_is_status_1_and_says_so(capsys, monkeypatch):
    monkeypatch.setenv("VITKERN_ISA", "mmx")
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "error: VITKERN_ISA=mmx cannot run" in out


def test_it_runs_where_the_extension_is_not_built(tmp_path):
    """In a clone that nobody built: the page says so, with status 1."""
    package = tmp_path / "vitkern"
    package.mkdir()
    for path in (ROOT / "vitkern").iterdir():
        if not path.name.startswith(("_C.", "__pycache__")):
            (package / path.name).symlink_to(path)
    # An editable install's finder would bring the extension of another clone.
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]"
    code += f"; sys.path.insert(0, {str(tmp_path)!r}); from vitkern.__main__ import main"
    command = [sys.executable, "-c", f"{code}; sys.exit(main(['doctor']))"]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot be loaded" in done.stdout and not done.stderr


def test_colours_are_for_those_who_watch(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with pathlib.Path(os.devnull).open("w") as nobody:
        assert not Paint.of(nobody).on
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert Paint.of(nobody)("x", "red") == "\033[31mx\033[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert Paint.of(nobody)("x", "red") == "x"
