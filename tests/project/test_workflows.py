"""What GitHub would run and read, as far as it can be tried here."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.project.test_commands import try_make
from tools import release_notes

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
FORMS = sorted(
    path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
)


def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11 and newer")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def runs(workflow: dict) -> list[str]:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def check_schema(schema: str, path: pathlib.Path) -> None:
    """By the schemas that GitHub's editors use, which check-jsonschema carries."""
    pytest.importorskip("check_jsonschema", reason="has the schema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_keep_the_schema(name):
    check_schema("vendor.github-workflows", FOLDER / name)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_what_exists(name):
    """make's targets, scripts of the repository and their like: nothing else is called."""
    known = ("make ", ".ci/run", "python -m ", "python tools/", "gh release create ")
    for line in runs(WORKFLOWS[name]):
        assert line.startswith(known), f"{name} runs {line!r}: give it a target in the Makefile"
        if line.startswith("make "):
            target = line.split()[1]
            assert try_make(target).returncode == 0, f"{name}: no target {target}"
        script = line.split()[1] if line.startswith("python tools/") else ".ci/run"
        assert (ROOT / script).is_file(), f"{name}: {line}"


def test_ci_runs_the_tests():
    """On a fresh clone: what .ci/run does, and that is `make test`."""
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")
    assert ".ci/run" in runs(WORKFLOWS["ci.yml"])


def test_pythons_are_those_of_the_package():
    declared = project()["project"]
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    pythons = [m[1] for text in declared["classifiers"] if (m := re.fullmatch(pattern, text))]
    assert declared["requires-python"] == f">={pythons[0]}"
    matrix = WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == pythons
    wheels = project()["tool"]["cibuildwheel"]["build"]
    assert wheels == [f"cp{python.replace('.', '')}-*" for python in pythons]
    others = re.findall(
        r'python-version: "([\d.]+)"', "".join(p.read_text() for p in FOLDER.glob("*"))
    )
    assert set(others) <= set(pythons)


# ---- releases ------------------------------------------------------------------------------------

CHANGELOG = """# Changelog

## [0.2.0] - unreleased

- soon

## [0.1.1] - 2026-02-03

### Added

- a thing

## [0.1.0] - 2026-01-02
"""


def test_release_notes_are_the_version_s_section():
    assert release_notes.notes(CHANGELOG, "0.1.1") == "### Added\n\n- a thing"


@pytest.mark.parametrize(
    "version, said",
    [("0.2.0", "has no date"), ("0.1.0", "is empty"), ("9.9.9", "there are 0.2.0, 0.1.1, 0.1.0")],
)
def test_release_notes_refuse(version, said):
    with pytest.raises(ValueError, match=said):
        release_notes.notes(CHANGELOG, version)


def test_release_notes_read_this_changelog(capsys):
    """The newest section is there, under a heading that the tool understands."""
    version = project()["project"]["version"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.sub(rf"^(## \[{re.escape(version)}\]) - .*$", r"\1 - 2026-01-02", text, flags=re.M)
    assert "### Added" in release_notes.notes(dated, version)
    assert release_notes.main(["0.0.0"]) == 1 and "no section 0.0.0" in capsys.readouterr().err


# ---- citation, issues ----------------------------------------------------------------------------


def test_citation_keeps_the_schema():
    check_schema("vendor.citation-file-format", ROOT / "CITATION.cff")


def test_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    declared = project()["project"]
    assert (citation["version"], citation["license"]) == (declared["version"], declared["license"])


def test_issue_settings_keep_the_schema():
    check_schema("vendor.github-issue-config", ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_ask_for_vitkern_doctor(form):
    check_schema("vendor.github-issue-forms", form)
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    (info,) = (field for field in content["body"] if field["id"] == "info")
    assert "vitkern doctor" in info["attributes"]["description"]
    assert info["validations"]["required"]
