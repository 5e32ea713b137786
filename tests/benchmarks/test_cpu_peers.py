"""vitkern beside other engines: who is missing says so, nothing that was measured is lost."""

import gc
import io
import json
import pathlib
import subprocess
import sys

import pytest
import torch

from benchmarks import models, rows
from benchmarks.cpu import __main__ as command
from benchmarks.cpu import results
from benchmarks.cpu import tables as published
from tests.conftest import ROOT
from vitkern import ViT, ViTConfig
from vitkern.bench import builders, cases, convert, tables, task, turns, worker
from vitkern.bench.cases import CASES, Case, Contestant

TINY = ViTConfig(image_size=32, width=32, depth=2, heads=2, mlp_width=64, classes=10)

# Speaks as worker.py does, without torch: sys.argv[1] is what it is to do.
FAKE = """
import json, os, sys
def say(**answer):
    print(json.dumps(answer), flush=True)
how, us = sys.argv[1], float(sys.argv[2])
if how == "missing":
    say(why="it is not installed", missing=True)
    sys.exit(1)
if how == "dies":
    print("its last words", file=sys.stderr, flush=True)
    os._exit(3)
say(ready=True, error=1e-7, version="1.0")
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "turn":
        if how == "dies later":
            os._exit(4)
        say(seconds=[us / 1e6] * 2, rate=1e12, steps={"qkv": 1e-3, "mlp": 2e-3})
    else:
        say(resident_bytes=2**20)
        break
"""


def fakes(tmp_path: pathlib.Path, **others: str):
    """A command for each contestant; `others`: provider -> how it misbehaves."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def start(one: Contestant, folder: pathlib.Path, threads: int) -> list[str]:
        us = "1000" if one.provider == "native" else "1500"
        return [sys.executable, "-I", "-S", str(script), others.get(one.provider, "works"), us]

    return start


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run over all cases with made-up contestants; its status."""
    monkeypatch.setattr(rows, "commit", lambda: "abc")
    monkeypatch.setattr(command, "let_torch_run_bf16", lambda: "")
    monkeypatch.delenv("VITKERN_ISA", raising=False)
    monkeypatch.setattr(turns, "ROUNDS", (2, 2))

    def start(*arguments: str, wrap=lambda runner: runner, **others: str) -> int:
        runner = turns.Runner(
            2, 0.0, say=lambda _: None, command=fakes(tmp_path, **others), config=lambda _: TINY
        )
        folder = tmp_path / "results"
        return command.main([*arguments, "--results", str(folder)], wrap(runner))

    return start


HERE = cases.machine_class(command.features()["flags"])


def test_a_complete_run_is_published_in_its_class(run, tmp_path, capsys):
    other = "amx" if HERE != "amx" else "avx2"
    folder = tmp_path / "results"
    folder.mkdir()
    results.published(other, folder).write_text("of another class\n")
    assert run() == 0
    assert results.published(other, folder).read_text() == "of another class\n"
    found = rows.read(results.published(HERE, folder))
    assert not results.unfinished(HERE, folder).exists()
    for case in CASES:
        these = [row for row in found if results.is_of(row, case)]
        timed = {row["provider"] for row in these if "us" in row}
        assert timed == {*cases.PEERS, "native"}
        assert {(row["commit"], row["machine"]["cpu"]) for row in these} != set()
        assert all("us" in row or row["why"] for row in these)
        vitkerns = [row["precision"] for row in tables.ours(these)]
        assert vitkerns == cases.precisions()
    assert "1.50x the best peer" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(run, tmp_path, capsys):
    done = []

    def counted(runner, stop_at):
        real = runner.run

        def once(case, contestants):
            if case == stop_at:
                raise KeyboardInterrupt
            done.append(case)
            return real(case, contestants)

        runner.run = once
        return runner

    first, second = cases.QUICK
    with pytest.raises(KeyboardInterrupt):
        run("--quick", wrap=lambda runner: counted(runner, second))
    assert done == [first]
    assert not (tmp_path / "results" / f"cpu-{HERE}-quick.jsonl").exists()
    assert run("--quick", wrap=lambda runner: counted(runner, None)) == 0
    assert done == [first, second], "each was timed once"
    assert (tmp_path / "results" / f"cpu-{HERE}-quick.jsonl").exists()
    assert "kept from the run before" in capsys.readouterr().out


def test_rows_of_other_code_are_not_continued(tmp_path):
    stamp = {"machine": {"cpu": "a"}, "commit": "abc", "date": "2026-01-01"}
    path = tmp_path / "cpu-avx2.unfinished.jsonl"
    results.Kept(path, stamp).add(CASES[0], [{"kind": "peer"}])
    assert len(results.Kept(path, {**stamp, "date": "2026-01-02"}).rows) == 1
    for changed in ({"commit": "abd"}, {"machine": {"cpu": "b"}}, {"commit": "abc+"}):
        found = results.Kept(path, {**stamp, **changed})
        assert not found.rows and found.dropped


def test_a_run_without_a_peer_leaves_the_published_one(run, tmp_path, capsys):
    path = tmp_path / "results" / f"cpu-{HERE}-quick.jsonl"
    path.parent.mkdir()
    path.write_text("an older run\n")
    assert run("--quick", openvino="missing") == 1
    assert path.read_text() == "an older run\n"
    assert "openvino: it is not installed" in capsys.readouterr().err
    assert run("--quick") == 0, "what was lacking is tried again"
    assert len(rows.read(path)) == 2 * len(cases.contestants(command.features()["flags"]))


@pytest.mark.parametrize("how", ("dies", "dies later"))
def test_a_peer_that_dies_has_a_row_that_says_so(how, tmp_path):
    runner = turns.Runner(
        2, 0.0, say=lambda _: None, command=fakes(tmp_path, onnxruntime=how), config=lambda _: TINY
    )
    everybody = cases.contestants({})
    found = runner.run(CASES[0], everybody)
    assert [(row["provider"], row["precision"]) for row in found] == [
        (one.provider, one.precision) for one in everybody
    ]
    (dead,) = (r for r in found if r["provider"] == "onnxruntime" and r["precision"] == "fp32")
    assert "ended with status" in dead["why"] and ("last words" in dead["why"]) == (how == "dies")
    assert any("us" in row for row in found if row["provider"] == "openvino")
    lines = "\n".join(tables.details(found))
    assert "ended with status" in lines and cases.NO_BF16 in lines


def test_vitkern_without_a_time_is_a_failure(run, tmp_path, capsys):
    assert run("--quick", native="dies") == 1
    assert "vitkern fp32" in capsys.readouterr().err


class Timed:
    """Stands in for the runner and for the rows that are kept: a row takes 400 s."""

    def __init__(self):
        self.now, self.begun, self.rows = 0.0, [], []

    def run(self, case, contestants):
        self.now += 400
        self.begun.append(case)
        return []

    def has(self, case):
        return False

    def add(self, case, found):
        pass


def test_a_run_out_of_time_begins_no_row(monkeypatch, capsys):
    timed = Timed()
    monkeypatch.setattr(command.time, "perf_counter", lambda: timed.now)
    command.run(timed, timed, CASES, [], minutes=10)
    assert timed.begun == [CASES[0]], "two would take more than 10 minutes"
    assert "no time left of 10 minutes" in capsys.readouterr().out


# ---- which machine ----


@pytest.mark.parametrize(
    "flags, name",
    [
        ("", "portable"),
        ("avx2 fma", "avx2"),
        ("avx2 fma avx_vnni", "avx_vnni"),
        ("avx2 fma avx512f", "avx512"),
        ("avx2 fma avx512f avx512_vnni", "avx512_vnni"),
        ("avx2 fma avx512f avx512_vnni avx512_bf16", "avx512_bf16"),
        ("avx2 fma avx512f avx512_vnni avx512_bf16 avx_vnni", "avx512_wide"),
        ("avx2 fma avx512f avx512_vnni avx512_bf16 avx_vnni amx_tile amx_bf16", "amx"),
    ],
)
def test_the_class_is_the_best_instruction_set(flags, name):
    assert cases.machine_class(dict.fromkeys(flags.split(), True)) == name


def test_bf16_is_asked_of_peers_where_the_cpu_has_it():
    def asked(flags):
        return {
            (one.provider, one.precision)
            for one in cases.contestants(flags)
            if not one.why_not and one.provider != "native"
        }

    assert ("openvino", "bf16") not in asked({}) and ("openvino", "int8") in asked({})
    assert ("compile", "bf16") in asked({"amx_bf16": True})


def test_a_library_to_preload_that_is_not_there_is_refused(run, tmp_path, capsys):
    missing = tmp_path / "none.so"
    assert run("--preload", str(missing)) == 2
    assert f"--preload {missing}: no such file" in capsys.readouterr().err


def test_another_class_is_refused_in_one_sentence(run, capsys):
    wanted = "amx" if HERE != "amx" else "avx2"
    assert run("--class", wanted) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"this CPU has no {cases.CLASSES[wanted][0]}" in said


@pytest.mark.skipif(HERE in ("amx", "amx_fp16"), reason="it would run")
def test_make_bench_amx_says_why_it_does_nothing():
    done = subprocess.run(["make", "bench-amx"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "this CPU has no AMX" in done.stderr


def test_a_forced_instruction_set_is_refused(run, monkeypatch, capsys):
    monkeypatch.setenv("VITKERN_ISA", "portable")
    assert run() == 2
    assert "VITKERN_ISA" in capsys.readouterr().err


# ---- tables ----


def row(provider, us, precision="fp32", error=1e-6):
    about = {"kind": "peer", "name": "B/16", "axes": Case("B/16", 8, 224).axes}
    times = {"us": us, "us_p20": us, "us_p80": us, "error": error, "version": "1"}
    made = {**about, "provider": provider, "precision": precision, **times, "resident_bytes": 2**30}
    steps = {"mlp": {"us": us, "gflops": 9.0, "of_rate": 0.9}}
    made |= {"gflops": 80.0, "multiply_gflops": 100.0, "steps": steps}
    machine = {"cpu": "a CPU", "threads": 2, "isa": "avx2", "torch": "2"}
    return {**made, "machine": machine, "commit": "abc", "date": "2026-01-01"}


MEASURED = [
    row("torch", 3e6),
    row("openvino", 2e6),
    row("openvino", 1e6, "bf16", error=1e-2),
    row("openvino", 5e5, "int8", error=0.2),
    row("native", 1.6e6),
    row("native", 8e5, "bf16", error=1e-3),
]


def test_a_rival_is_in_the_class_of_the_error():
    lines = tables.comparison(MEASURED)
    assert "| fp32 | 3000 ms | – | – | 2000 ms | 1600 ms | **1.25×** |" in lines[2]
    assert "| bf16 | 3000 ms (fp32) | – | – | 1000 ms | 800 ms | **1.25×** |" in lines[3]
    assert tables.rivals(MEASURED, "int8")["openvino"]["precision"] == "int8"


def test_an_error_beyond_its_class_is_a_failure():
    assert not tables.too_coarse(MEASURED)
    assert "its error is 1.0e-03" in tables.too_coarse([row("native", 1.0, error=1e-3)])[0]
    assert tables.too_coarse([row("native", 1.0, error=float("nan"))])


def test_every_measured_class_is_shown():
    both = {"avx512_vnni": MEASURED, "avx2": MEASURED}
    for text in (published.summary(both), published.text(both)):
        assert "**AVX-512 VNNI**: a CPU, 2 threads" in text and "**AVX2**: a CPU" in text
        assert "commit abc, 2026-01-01" in text and "OpenVINO 1" in text
        missing = text.split("Not measured with these peers yet: ")[1].rstrip(".").split("; ")
        others = [words for name, (words, _) in cases.CLASSES.items() if name not in both]
        assert missing == [*others[:-1], "CPUs without any of these"] and "AVX-VNNI" in missing
    assert not published.unmeasured(dict.fromkeys(cases.CLASSES, MEASURED))
    assert "**80%**" in published.text(both) and "| mlp |" in published.text(both)
    assert published.summary({}) == published.text({}) == published.UNMEASURED


# ---- a contestant's own process ----


@pytest.fixture
def folder(tmp_path):
    turns.write_case(tmp_path, TINY, 3)
    return tmp_path


def serve(folder, provider, precision="fp32"):
    given = {"provider": provider, "precision": precision, "threads": 2, "folder": str(folder)}
    asked = [{"do": "turn", "calls": 2}, {"do": "end"}]
    said = io.StringIO()
    status = worker.serve(given, map(json.dumps, asked), said)
    return status, [json.loads(line) for line in said.getvalue().splitlines()]


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_vitkern_answers(folder, precision):
    status, (ready, turn, end) = serve(folder, "native", precision)
    assert status == 0 and ready["ready"] and len(turn["seconds"]) == 2
    assert ready["error"] < cases.allowed_error(precision)
    assert turn["rate"] > 0 and 0 < sum(turn["steps"].values()) < sum(turn["seconds"])
    assert end["resident_bytes"] > 2**20


@pytest.mark.full  # importing timm takes seconds
def test_eager_pytorch_answers(folder):
    status, answers = serve(folder, "torch")
    if answers[0].get("missing"):
        pytest.skip(answers[0]["why"])
    assert status == 0 and answers[0]["error"] < cases.allowed_error("fp32")


def test_the_weights_of_the_case_are_not_kept_beside_the_model(folder):
    """Memory of a contestant is its own: what it was built from is gone when it is measured."""
    given = {"provider": "native", "precision": "fp32", "threads": 2, "folder": str(folder)}
    built, _, _ = worker.prepare(given)
    (weight,) = (p for n, p in built.model.named_parameters() if n == "blocks.0.mlp.fc1.weight")
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    alive = [t for t in gc.get_objects() if type(t) in kinds and t.shape == weight.shape]
    same = [t for t in alive if torch.equal(t, weight)]
    assert {t.data_ptr() for t in same} == {weight.data_ptr()}


def test_a_library_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    status, (said,) = serve(folder, "openvino")
    assert status == 1 and said["missing"] and "openvino cannot be imported" in said["why"]


def test_a_library_for_a_conversion_is_named(folder, monkeypatch):
    monkeypatch.setattr(task.importlib.util, "find_spec", lambda name: None)
    given = task.Task.read(folder, "int8", 2)
    with pytest.raises(task.LeftOut, match="openvino is not installed") as left_out:
        convert.converted(given, "model.int8.xml")
    assert left_out.value.missing


@pytest.mark.full  # a process that imports torch
def test_a_conversion_that_fails_says_why(folder, monkeypatch):
    monkeypatch.setattr(convert, "require", lambda package: None)
    (folder / task.CASE_FILE).write_bytes(b"broken")
    given = task.Task(TINY, {}, torch.zeros(1), torch.zeros(1), "fp32", 2, folder)
    with pytest.raises(RuntimeError, match=r"model\.onnx could not be written: .+"):
        convert.converted(given, "model.onnx")


def test_an_error_of_a_peer_is_its_answer(folder, monkeypatch):
    def fail(task):
        raise ArithmeticError("no\nmore")

    monkeypatch.setitem(builders.BUILDERS, "torch", fail)
    status, (said,) = serve(folder, "torch")
    assert status == 1 and said == {"why": "ArithmeticError: no", "missing": False}


@pytest.mark.parametrize("changes", ({}, {"pool": "mean"}, {"depth": 0}), ids=str)
def test_the_steps_are_all_of_the_work(changes):
    model = ViT(TINY.replace(**changes))
    steps = models.step_flops(model, 3, 32)
    if changes.get("depth") != 0:  # engine_flops counts a last block that is not there
        assert sum(steps.values()) == models.engine_flops(model, 3, 32)
    assert steps["qkv"] == 0 if changes.get("depth") == 0 else steps["qkv"] > 0
