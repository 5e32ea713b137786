"""The documentation site has every page, and only pages that are there; its build is strict."""

import pkgutil
import re
import shutil
import subprocess
import sys

import pytest

import vitkern.embedding
from tests.conftest import ROOT
from tools import site_pages
from vitkern.cli import COMMANDS

yaml = pytest.importorskip("yaml")
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NAMED = site_pages.titles(CONFIG["nav"])
API_PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_navigation_names_every_page_once():
    written = {path.name for path in (ROOT / "docs").rglob("*.md")}
    assert set(NAMED) == written | set(site_pages.PAGES.values())
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    twice = [page for page in NAMED if len(re.findall(rf": {re.escape(page)}$", text, re.M)) != 1]
    assert not twice


def test_pages_of_the_top_level_exist():
    assert all((ROOT / name).is_file() for name in site_pages.PAGES)
    clash = set(site_pages.PAGES.values()) & {path.name for path in (ROOT / "docs").glob("*.md")}
    assert not clash, f"docs/ has them, too: {clash}"


def test_every_command_has_a_guide():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (`vitkern .*?) \|.*\| \[.*\]\((.+)\) \|$", text, re.M))
    shown = {name for row in rows for name in re.findall(r"`vitkern (\w+)`", row)}
    assert shown == set(COMMANDS)


def test_links_are_turned_to_the_site_s_places():
    page = ROOT / "docs" / "index.md"
    assert site_pages.place(page, "../README.md") == "overview.md"
    assert site_pages.place(page, "pictures/serve.png") == "pictures/serve.png"
    assert site_pages.place(ROOT / "README.md", "docs/serve.md") == "serve.md"
    assert site_pages.place(page, "../benchmarks/results") is None, "a folder"
    assert "examples/fine_tune.py" in site_pages.linked_files()


DOCUMENTED = {one[1]: re.findall(r"\w+", one[2] or "") for one in site_pages.API.finditer(API_PAGE)}


def test_the_api_page_names_what_is_there_and_documented():
    for name, members in DOCUMENTED.items():
        found = pkgutil.resolve_name(name)
        assert found.__doc__ and found.__doc__.strip(), f"{name} has no docstring"
        for member in members:
            assert hasattr(found, member) or member in found.__doc__, f"{name} has no {member}"


def test_the_api_page_has_every_public_name():
    shown = {*DOCUMENTED, "vitkern.__version__"}
    assert {f"vitkern.{name}" for name in vitkern.__all__} <= shown
    assert {f"vitkern.embedding.{name}" for name in vitkern.embedding.__all__} <= shown
    for name in vitkern.__all__:
        assert f"`vitkern.{name}`" in API_PAGE, f"{name} is not in the table"


def build(folder, out) -> subprocess.CompletedProcess:
    # Not with -q: what is not said is not counted either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.full
def test_the_site_builds_and_a_broken_link_does_not(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    made = tmp_path / "site"
    assert all((made / page).with_suffix(".html").is_file() for page in NAMED)
    api = (made / "api.html").read_text(encoding="utf-8")
    assert 'id="vitkern.ViT.forward"' in api and ":::" not in api
    assert not re.search(r'src="https?://', api), "a page loads something from elsewhere"
    assert 'href="serve.html"' in (made / "overview.html").read_text(encoding="utf-8")
    copy = tmp_path / "clone"
    kept = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=kept)
    with open(copy / "docs" / "index.md", "a", encoding="utf-8") as page:
        page.write("\n[gone](numerics.md#no-such-section)\n")
    broken = build(copy, tmp_path / "broken")
    assert broken.returncode != 0 and "no-such-section" in broken.stderr
