"""The Python snippets of docs/ run, page by page, in a folder that has what they name."""

import pathlib
import re

import pytest
import torch

import vitkern
from benchmarks import peers
from tests.conftest import ROOT
from tests.project.test_docs import python_blocks

# Signatures, not programs; and serve.md's snippet asks a server (tests/serve/test_process.py).
ELSEWHERE = {"ops.md", "serve.md"}
PAGES = [
    path
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name not in ELSEWHERE and python_blocks(path)
]
SLOW = {"timm.md"}  # timm and transformers are imported, which takes half a minute


def ready(block: str) -> bool:
    """Whether what a block's first line asks for is here."""
    needed = re.match(r"# needs (.+)\n", block)
    if not needed:
        return True
    if needed[1] == "a GPU":
        return torch.cuda.is_available()
    if needed[1] == "timm":
        return peers.timm_model("vit_tiny_patch16_224") is not None
    try:
        __import__(needed[1])
    except ImportError:
        return False
    return True


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """What the snippets name: small, and called as they call it."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = vitkern.ViT("Ti/16", image_size=32, depth=2, classes=3).eval()
    vitkern.save(model, "deit_tiny.safetensors")
    vitkern.save(model, "my-vit", layout="huggingface")
    vitkern.save(model, "timm/vit_base_patch16_224.augreg_in1k", layout="huggingface")
    (tmp_path / "photos").mkdir()
    for name in ("cat.png", "photos/one.png", "photos/two.jpg"):
        image.effect_noise((40, 50), 80).convert("RGB").save(name)
    return tmp_path


def test_pages_have_snippets():
    assert {page.name for page in PAGES} >= {"index.md", "inspect.md", "numerics.md", "embed.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.full] * (page.name in SLOW)) for page in PAGES],
    ids=lambda page: page.name,
)
def test_snippets_run(page, folder, capsys):
    state = vitkern.ViT("Ti/16", image_size=32, depth=1, classes=3).state_dict()
    names: dict[str, object] = {"torch": torch, "vitkern": vitkern, "state_dict": state}
    for block in python_blocks(page):
        if ready(block):
            exec(compile(block, page.name, "exec"), names)
            said = capsys.readouterr().out
            for promise in re.findall(r"^print\(.*\)  # (\(.*?\)|True)", block, re.M):
                assert promise in said, f"{page.name} promises {promise}: {said}"
