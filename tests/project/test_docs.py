"""The documents tell the truth: snippets run, tables match the results, links lead somewhere."""

import importlib.util
import pathlib
import re

import pytest
import torch

from benchmarks import peers, report
from benchmarks.rows import LATEST, read
from tests.conftest import ROOT
from vitkern.cli import COMMANDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def python_blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_readme_snippets_run(capsys):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    for block in blocks:
        if block.startswith("# needs timm") and peers.timm_model("vit_tiny_patch16_224") is None:
            continue
        exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (1, 1000)
    assert "blocks.0 has a hook" in capsys.readouterr().out


def test_ops_page_is_current():
    spec = importlib.util.spec_from_file_location("gen", ROOT / "tools" / "gen_ops_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current = module.TARGET.read_text() == module.render()
    assert current, "docs/ops.md does not match the table: run python tools/gen_ops_docs.py"


def test_tables_are_those_of_the_results_file():
    rows = [row for path in report.published() for row in read(path)]
    for path, text in report.documents(rows).items():
        assert path.read_text() == text, f"{path.name}: run python -m benchmarks.report"


def test_results_say_where_they_come_from():
    for path in report.published():
        rows = read(path)
        assert len({(r["commit"], r["date"], str(r["machine"])) for r in rows}) == 1
        assert all(r["machine"]["cpu"] and r["machine"]["torch"] for r in rows)
    native = [r for r in read(LATEST) if r.get("provider") == "native"]
    assert native and {r["kind"] for r in native} == {"op", "model"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page):
    """`vitkern/...`, `csrc/...` and their like in backquotes are real files."""
    folders = "vitkern|csrc|tests|benchmarks|tools|docs|examples"
    for name in re.findall(rf"`((?:{folders})/[\w./]+\.\w+)`", page.read_text()):
        if name not in ("benchmarks/results/partial.jsonl", "benchmarks/results/scaling.jsonl"):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_readme_shows_every_command():
    text = (ROOT / "README.md").read_text()
    assert all(f"vitkern {name}" in text for name in COMMANDS)
