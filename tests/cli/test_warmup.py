"""`vitkern warmup`: kernels compiled ahead of time into the user's cache, also without a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from tests.gpu.aot_kernels import plain_variant, refused
from vitkern import ViT, ViTConfig
from vitkern.__main__ import main
from vitkern.cli import warmup
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu.launch import Recorder, executing
from vitkern.gpu.runtime.cache import FOLDER, Cache


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_the_next_forward_finds_its_kernels(folder, monkeypatch, capsys):
    """In processes of their own, and once."""
    wanted = [plain_variant("sm_80")]
    monkeypatch.setattr(warmup, "_variants", lambda *given: wanted)
    command = ["warmup", "B/16", "--arch", "sm_80", "--jobs", "1"]
    assert main(command) == 0
    assert "0 there already, 1 compiled, 0 failed" in capsys.readouterr().out
    cache = Cache("sm_80")
    found = cache.find(wanted[0])
    assert found is not None and found == cache.compile(wanted[0])
    assert main(command) == 0
    assert "1 there already, 0 compiled, 0 failed" in capsys.readouterr().out


def test_a_kernel_that_fails_is_named_and_the_others_are_kept(folder, monkeypatch, capsys):
    wanted = [plain_variant("sm_80", refused), plain_variant("sm_80")]
    monkeypatch.setattr(warmup, "_variants", lambda *given: wanted)
    assert main(["warmup", "B/16", "--arch", "sm_80", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "FAILED refused-" in said and "1 compiled, 1 failed" in said
    assert [Cache("sm_80").find(one) is None for one in wanted] == [True, False]


@pytest.mark.parametrize(
    "arch, size, processors", [("sm_90", 64, None), ("gfx90a", None, None), ("sm_90", None, 20)]
)
def test_all_kernels_of_a_forward_are_among_them(folder, monkeypatch, arch, size, processors):
    asked = []
    monkeypatch.setattr(warmup, "_variants", lambda *given: asked.append(given) or [])
    command = ["warmup", "Ti/16", "--batch", "3", "--precision", "fp16", "--arch", arch]
    command += [] if size is None else ["--image-size", str(size)]
    assert main(command + ([] if processors is None else ["--processors", str(processors)])) == 0
    monkeypatch.undo()
    found = set(warmup._variants(*asked[0]))
    recorder = Recorder("gfx942" if arch == "gfx90a" else arch, processors=processors)
    changes = {} if size is None else {"image_size": size}
    config = ViTConfig.named("Ti/16", depth=3, **changes)
    model = ViT(config, device="meta", dtype=torch.float16).eval()
    side = config.patch_size * config.grid[0]
    image = torch.empty(3, 3, side, side, dtype=torch.float16, device="meta")
    with torch.no_grad(), executing(recorder):
        y = torch.empty(3, 1000, dtype=torch.float16, device="meta")
        GpuEngine(model, "fp16", recorder).start("logits", image, y)
    assert {one.variant for one in recorder.launches} <= found


@pytest.mark.parametrize(
    "words, said",
    [
        (["B/16"], "there is no GPU here: name an architecture by --arch"),
        (["B/16", "--processors", "20"], "--processors 20 is for another GPU, but which arch"),
        (["B/16", "--arch", "sm_80", "--precision", "fp8"], "unknown precision 'fp8'; known: fp32"),
        (["X/99", "--arch", "sm_80"], "X/99"),
    ],
)
def test_mistakes_are_one_line(folder, monkeypatch, capsys, words, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["warmup", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--batch", "0"], ["--batch", "a"], ["--arch", "sm_75"]])
def test_what_is_no_number_or_architecture_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(["warmup", "B/16", *words])
