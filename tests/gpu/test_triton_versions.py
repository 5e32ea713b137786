"""Every Triton that a user's torch may bring: do the kernels compile, and what of older ones?

`make test` tries the installed one alone; tools/triton_matrix.py goes through every version,
architecture and model, and docs/gpu.md has its table. Others are installed beside
(other_tritons.py); without an index the tests of them are skipped.
"""

import json
import subprocess
import textwrap

import pytest

pytest.importorskip("triton")
import triton

from tests.gpu import other_tritons, version_matrix
from tests.gpu.other_tritons import TOO_OLD, VERSIONS
from tests.gpu.test_compiler import OLD_TRITON
from tools import triton_matrix
from vitkern.gpu.configs import ARCHS


def run_with(version: str, *command: str) -> subprocess.CompletedProcess:
    try:
        return other_tritons.run_with(version, *command)
    except other_tritons.NotInstalled as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", ["sm_80", "gfx90a"])
def test_a_forward_compiles_with_the_installed_triton(arch):
    wanted = version_matrix.forward(arch, "Ti/16", "bf16")
    assert len(wanted) > 5 and not version_matrix.compile_all(arch, wanted)


COUNT = """
from tests.gpu.aot_kernels import plain_variant
from vitkern.gpu.aot.build import compile_variant
print([compile_variant(plain_variant(arch), arch).facts["hidden_parameters"]
       for arch in ("sm_80", "gfx942")])
"""


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_the_build_counts_the_parameters_that_triton_appends(version):
    """3.4 has memory for all blocks together, later ones also some for the profiler."""
    ran = run_with(version, "-c", COUNT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == ("[1, 1]" if version == "3.4.0" else "[2, 2]")


@pytest.mark.full
@pytest.mark.parametrize("version", TOO_OLD)
def test_the_references_run_with_an_older_one(version):
    """With the real one: what test_compiler.py shows with another version's number."""
    script = textwrap.dedent(OLD_TRITON).replace('triton.__version__ = "3.3.1"', "")
    ran = run_with(version, "-c", script)
    assert ran.returncode == 0, ran.stderr
    assert "the GPU backend is not available (the GPU kernels need Triton 3.4" in ran.stdout
    assert f"this is {version})" in ran.stdout


def test_the_installed_one_is_in_the_matrix():
    assert triton.__version__ in VERSIONS


# ---- the matrix ----------------------------------------------------------------------------------


class Cells:
    """In the place of the process that compiles a cell; `said` of some of them, by architecture."""

    def __init__(self, monkeypatch, tmp_path, **said):
        self.ran, self.said = [], said
        self.rows = tmp_path / "rows.jsonl"
        monkeypatch.setattr(triton_matrix, "ROWS", self.rows)
        monkeypatch.setattr(triton_matrix, "source_of_cell", lambda arch, model: f"{arch} {model}")
        monkeypatch.setattr(triton_matrix, "run_with", self.run)

    def run(self, version, *command):
        arch, model = command[2:4]
        self.ran.append((version, arch, model))
        if version == "3.9.0":
            raise other_tritons.NotInstalled("triton 3.9.0 cannot be installed: no index")
        status, out, err = self.said.get(arch, (0, "", ""))
        out = out or f"triton {version} {arch}: 7 of 7 kernels in 3 s\n"
        return subprocess.CompletedProcess(command, status, out, err)


def test_a_cell_is_a_row_and_is_not_compiled_again(monkeypatch, tmp_path):
    cells = Cells(monkeypatch, tmp_path)
    wanted = ["--triton", "3.7.1,3.8.0", "--arch", "sm_80", "--model", "Ti/16"]
    assert triton_matrix.run(triton_matrix.parsed(wanted)) == 0
    assert cells.ran == [("3.7.1", "sm_80", "Ti/16"), ("3.8.0", "sm_80", "Ti/16")]
    rows = [json.loads(line) for line in cells.rows.read_text().splitlines()]
    assert [row["triton"] for row in rows] == ["3.7.1", "3.8.0"]
    assert all((row["kernels"], row["failed"]) == (7, 0) for row in rows)
    assert triton_matrix.run(triton_matrix.parsed(wanted)) == 0
    assert len(cells.ran) == 2, "both are there"
    monkeypatch.setattr(triton_matrix, "source_of_cell", lambda arch, model: "kernels changed")
    assert triton_matrix.run(triton_matrix.parsed(wanted)) == 0
    assert len(cells.ran) == 4 and len(cells.rows.read_text().splitlines()) == 2


def test_what_fails_is_in_the_row_and_is_said_every_time(monkeypatch, tmp_path, capsys):
    lines = (
        "triton 3.7.1 sm_90: 5 of 7 kernels in 2 s\nFAILED sm_90 a: X: y\nFAILED sm_90 b: X: z\n"
    )
    died = (-6, "", "compiling gfx950 first\ncompiling gfx950 second\nLLVM ERROR: no\n")
    cells = Cells(monkeypatch, tmp_path, sm_90=(1, lines, ""), gfx950=died)
    wanted = triton_matrix.parsed(
        ["--triton", "3.7.1", "--arch", "sm_80,sm_90,gfx950", "--model", "Ti/16"]
    )
    assert triton_matrix.run(wanted) == 1
    rows = triton_matrix.recorded()
    assert rows["3.7.1", "sm_90", "Ti/16"]["failed"] == 2
    assert rows["3.7.1", "gfx950", "Ti/16"]["wrong"][0].startswith("ended by signal 6 at second: ")
    table = triton_matrix.table(rows)
    assert "| 3.7.1 |" in table and "2 of 7 fail" in table and "died" in table
    assert triton_matrix.run(wanted) == 1 and len(cells.ran) == 3
    assert "FAILED sm_90 a: X: y" in capsys.readouterr().out


def test_a_version_that_cannot_be_installed_is_left_out(monkeypatch, tmp_path, capsys):
    cells = Cells(monkeypatch, tmp_path)
    wanted = triton_matrix.parsed(["--triton", "3.9.0", "--arch", "sm_80,sm_90"])
    assert triton_matrix.run(wanted) == 0
    assert len(cells.ran) == 1 and not triton_matrix.recorded()
    assert "cannot be installed" in capsys.readouterr().out


def test_the_page_has_the_recorded_matrix():
    rows = triton_matrix.recorded()
    assert triton_matrix.table(rows) in triton_matrix.PAGE.read_text(), (
        "run python -m tools.triton_matrix --page"
    )
    assert {version for version, _, _ in rows} <= {*VERSIONS}
    assert set(ARCHS) <= {*triton_matrix.ARCHS}


def test_a_cell_s_hash_is_of_the_kernels_that_it_compiles():
    one = triton_matrix.source_of_cell("sm_80", "Ti/16")
    assert one == triton_matrix.source_of_cell("sm_80", "Ti/16")
    assert one != triton_matrix.source_of_cell("sm_90", "Ti/16")
