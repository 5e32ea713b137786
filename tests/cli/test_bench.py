"""`vitkern bench` on a CPU: who takes part, what is written, files of machines side by side."""

import json
import pathlib
import re
import sys

import pytest

from benchmarks.cpu import results
from tests.benchmarks.test_cpu_peers import TINY, fakes
from vitkern.__main__ import main
from vitkern.bench import cases, compare, limits, pictures, rows, session, task, turns
from vitkern.cli import bench


def run(capsys, *arguments):
    try:
        status = main(["bench", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Contestants that answer at once: 1.5 ms everybody, 1 ms vitkern; others as told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(turns, "ROUNDS", (2, 2))
    monkeypatch.setattr(session, "LIMITS_S", 0.001)
    monkeypatch.setattr("vitkern.measure.limits.MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("vitkern.measure.machine.let_torch_run_bf16", lambda: "")
    monkeypatch.setattr(cases, "missing", lambda name: [])
    monkeypatch.setattr(session, "missing", lambda name: [])
    others: dict[str, str] = {}
    start = fakes(tmp_path, **others)

    def command(one, folder, threads):
        made = start(one, folder, threads)
        made[-2] = others.get(one.provider, "works")
        return made

    real = turns.Runner

    def runner(threads, seconds, say):
        return real(threads, seconds, say=lambda _: None, command=command, config=lambda _: TINY)

    monkeypatch.setattr(turns, "Runner", runner)
    return others


# ---- a run ----


def test_a_run_leaves_rows_tables_and_pictures(made_up, capsys, tmp_path):
    status, out, err = run(capsys, "--quick", "--precision", "fp32", "--out", "here")
    assert status == 0, err
    assert "| Ti/16 | 1 | 64 | fp32 | 1.5 ms |" in out and "**1.50×**" in out
    folder = tmp_path / "here"
    assert {p.name for p in folder.iterdir()} == {
        "results.jsonl", "report.md", "speedup.svg", "roofline.svg"
    }  # fmt: skip
    assert (folder / "report.md").read_text().strip() == out.strip()
    found = rows.read(folder / "results.jsonl")
    assert found[0]["kind"] == "limits" and found[0]["multiply_gflops"].keys() == {"fp32"}
    assert all({"machine", "commit", "vitkern", "date"} <= row.keys() for row in found)
    vitkerns = {row["precision"] for row in found if row.get("provider") == "native"}
    assert vitkerns == {"fp32"}


def test_json_is_the_rows(made_up, capsys):
    status, out, _ = run(capsys, "--quick", "--json", "--against", "none")
    found = json.loads(out)
    assert status == 0 and {row.get("provider") for row in found[1:]} == {"native"}


def test_vitkern_without_a_time_is_status_1(made_up, capsys):
    made_up["native"] = "dies"
    status, _, err = run(capsys, "--quick", "--precision", "fp32", "--against", "torch")
    assert status == 1 and "FAILED: vitkern fp32, Ti/16 batch 1: ended with status" in err


def test_a_peer_that_fails_is_part_of_the_result(made_up, capsys):
    made_up["openvino"] = "dies"
    status, out, _ = run(capsys, "--quick", "--precision", "fp32")
    assert status == 0 and "Without a time somewhere: OpenVINO" in out
    assert "its last words" in out


def test_without_matplotlib_there_are_tables(made_up, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, "--quick", "--precision", "fp32", "--against", "torch")
    assert status == 0 and "**1.50×**" in out and "no pictures: pictures need matplotlib" in err
    assert (tmp_path / "vitkern-bench" / "results.jsonl").is_file()


# ---- who takes part ----


def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cases.importlib.util, "find_spec", lambda name: None)
    assert session.installed() == ["torch", "compile"], "what torch itself brings"
    found = session.chosen({}, ["torch", "onnxruntime"], ["fp32"])
    (absent,) = [one for one in found if one.provider == "onnxruntime" and one.precision == "fp32"]
    assert absent.why_not == "not installed: pip install onnxruntime onnx onnxscript"


def test_fp32_of_a_peer_is_every_precision_s_rival():
    found = session.chosen({}, ["torch"], ["int8"])
    assert [(one.provider, one.precision) for one in found] == [
        ("torch", "fp32"), ("native", "int8")
    ]  # fmt: skip


def test_the_command_knows_every_peer():
    assert bench.PEERS == cases.PEERS


def test_without_timm_peers_run_vitkern_s_modules(tmp_path, monkeypatch):
    model = turns.write_case(tmp_path, TINY, 2)
    monkeypatch.setattr(task.importlib.util, "find_spec", lambda name: None)
    given = task.Task.read(tmp_path, "fp32", 2)
    assert given.modules == "vitkern"
    plain = given.plain_model()
    assert plain.explain(given.images).startswith("path: reference")
    assert plain.state_dict().keys() == model.state_dict().keys()


def test_a_run_without_timm_is_not_published():
    everybody = [row(1.0, name_, modules="timm") for name_ in cases.PEERS] + [row(1.0)]
    case = cases.Case("B/16", 8, 224)
    assert results.lacking(everybody, [case]) == []
    everybody[0]["modules"] = "vitkern"
    assert "without timm its modules are vitkern's" in results.lacking(everybody, [case])[0]


def test_a_child_of_a_clone_imports_that_clone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert turns.child_environment()["PYTHONPATH"].split(":")[0] == str(rows.ROOT)
    (tmp_path / "site" / "vitkern").mkdir(parents=True)
    monkeypatch.setattr(turns.vitkern, "__file__", str(tmp_path / "site/vitkern/__init__.py"))
    assert turns.child_environment()["PYTHONPATH"] == "elsewhere"


# ---- several files ----


def row(us, provider="native", precision="fp32", name="B/16", cpu="a CPU", **more):
    axes = {"B": 8, "Y": 224, "X": 224}
    about = {"kind": "peer", "name": name, "axes": axes, "precision": precision}
    machine = {"cpu": cpu, "threads": 2, "isa": "avx2", "torch": "2"}
    stamp = {"machine": machine, "commit": "none", "vitkern": "0.1.0", "date": "2026-01-01"}
    return {**about, "provider": provider, "us": us, "error": 1e-7, **stamp, **more}


def write(path: pathlib.Path, *found) -> pathlib.Path:
    rows.write(path, found)
    return path


def test_machines_are_compared(capsys, tmp_path):
    a = write(tmp_path / "a.jsonl", row(3e3), row(9e3, "torch"), row(1.0, name="S/16"))
    b = write(
        tmp_path / "b.jsonl",
        row(2e3, cpu="another", gflops=80.0, multiply_gflops=100.0), row(9e3, "torch"),
    )  # fmt: skip
    status, out, _ = run(capsys, "--compare", a, b)
    assert status == 0
    assert "A: " in out and "another, 2 threads, avx2, torch 2; vitkern 0.1.0, 2026-01-01" in out
    assert "| B/16 | 8 | 224 | fp32 | vitkern | 3.0 ms | 2.0 ms (80%) | 1.50× |" in out
    assert "| B/16 | 8 | 224 | fp32 | PyTorch | 9.0 ms | 9.0 ms | 1.00× |" in out
    assert "1 of A" in out, "what only one file has is counted"


def test_three_files_have_two_ratios(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", row(1e3 * i)) for i in (1, 2, 4)]
    assert "| 1.0 ms | 2.0 ms | 4.0 ms | 0.50× | 0.25× |" in compare.table(paths)


def test_the_published_results_can_be_compared(capsys):
    folder = rows.ROOT / "benchmarks" / "results"
    status, out, _ = run(capsys, "--compare", folder / "cpu-avx2.jsonl", folder / "cpu-avx2.jsonl")
    assert status == 0 and set(re.findall(r"\d\.\d\d×", out)) == {"1.00×"}


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "no results file"),
        ("", "has no rows"),
        ("{", "results.jsonl:1 is not a results row"),
        ("[]", "it has no kind"),
        ('{"kind": "peer"}', "does not say its machine"),
        (json.dumps({**row(1.0), "kind": "op"}), "no times of models"),
        (json.dumps(row(1.0, name="L/16")), "in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(text, said, capsys, tmp_path):
    good, other = write(tmp_path / "good.jsonl", row(1.0)), tmp_path / "results.jsonl"
    if text is not None:
        other.write_text(text)
    status, _, err = run(capsys, "--compare", good, other)
    assert status == 2 and said in err and "Traceback" not in err


def test_pictures_show_what_there_is(tmp_path):
    work = {"flops": 10**9, "bytes": 10**7}
    found = [row(9e3, "torch", **work), row(3e3, **work)]
    assert pictures.speed_bars(found) == [
        ("B/16 batch 8 224 px fp32", {"torch": 1.0, "native": 3.0})
    ]
    assert [path.name for path in pictures.draw(found, tmp_path)] == ["speedup.svg"]
    assert pictures.draw([row(3e3)], tmp_path) == [], "nothing to compare with, no limits"


def test_a_limit_is_the_best_that_the_machine_showed():
    busy = {"kind": "limits", "multiply_gflops": {"fp32": 50.0}, "read_gbs": {"memory": 9.0}}
    quiet = {"kind": "limits", "multiply_gflops": {"fp32": 80.0}, "read_gbs": {"memory": 7.0}}
    found = limits.best(busy, quiet)
    assert (found["multiply_gflops"], found["read_gbs"]) == ({"fp32": 80.0}, {"memory": 9.0})


# ---- refusals ----


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--compare", "a.jsonl"), "give two results files or more"),
        (("--model", "Q/16"), "unknown variant"),
        (("--image-size", "100", "--model", "B/16"), "100"),
        (("--threads", "0"), "--threads 0: it must be positive"),
        (("--seconds", "-1"), "--seconds -1.0: it must be positive"),
        (("--dtype", "bf16"), "--dtype is for a GPU"),
        (("--full",), "--full is for --suite or --device cuda"),
        (("--", "-k", "layernorm"), "add --suite before --"),
        (("--suite", "--precision", "fp32"), "--precision is not for --suite"),
        (("--suite", "--model", "B/16"), "--model is not for --suite"),
        (("--device", "cuda", "--threads", "2"), "--threads is for the CPU"),
        (("--precision", "fp8"), "choose from fp32,tf32,bf16,int8"),
        (("--against", "jax"), "choose from torch,compile,onnxruntime,openvino"),
        (("--batch", "0"), "no list of sizes"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, said, capsys):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and said in err and "Traceback" not in err
