"""Every command on tiny inputs, and the errors a user meets."""

import json
import re
import subprocess
import sys

import pytest
import torch

from vitkern import ViT, image_files
from vitkern.__main__ import main
from vitkern.cli import COMMANDS, bench
from vitkern.measure import charts
from vitkern.measure.timing import Spread, Turns

PIL = pytest.importorskip("PIL.Image", reason="classify reads images with Pillow")


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of a command."""
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as stop:  # argparse's own errors
        status = stop.code
    said = capsys.readouterr()
    return status, said.out, said.err


# ---- the command line itself ----


def test_help_lists_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(name in out for name in COMMANDS)


def test_unknown_command_is_refused(capsys):
    status, _, err = run(capsys, "fly")
    assert status == 2
    assert "fly" in err and "demo" in err


def test_help_needs_no_torch():
    code = "import sys, vitkern.__main__ as m; m.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m vitkern doctor | true"
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in said.stderr


# ---- summary, bench ----


def test_summary_counts_parameters(capsys):
    status, out, _ = run(capsys, "summary", "Ti/16")
    assert status == 0
    assert "5,717,416" in out


def test_summary_takes_another_size_and_head(capsys):
    status, out, _ = run(capsys, "summary", "Ti/16", "--image-size", 32, "--classes", 10)
    assert status == 0
    assert "5,717,416" not in out


def test_summary_speaks_json(capsys):
    status, out, _ = run(capsys, "summary", "Ti/16", "--json")
    found = json.loads(out)
    assert status == 0 and found["parameters"] == 5_717_416
    assert sum(row["parameters"] for row in found["rows"]) == found["parameters"]


def test_summary_refuses_an_unknown_name(capsys):
    status, _, err = run(capsys, "summary", "vit_bass_patch16_224")
    assert status == 2
    assert "did you mean" in err and "Traceback" not in err


def test_bench_says_that_it_needs_a_checkout(capsys, tmp_path):
    status, _, err = run(capsys, "bench", "--suite", "--source", tmp_path)
    assert status == 2
    assert "clone" in err


def test_bench_hands_its_arguments_to_pytest(capsys, monkeypatch, tmp_path):
    calls = []

    def note(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bench.subprocess, "run", note)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "pictures"
    arguments = ("--suite", "--quick", "--results", rows, "--out", out, "--", "-k", "layernorm")
    assert run(capsys, "bench", *arguments)[0] == 0
    suite, report = calls
    assert {"--benchmark-only", "--quick", str(rows), "-k", "layernorm"} <= set(suite)
    assert {str(rows), str(out)} <= set(report)


# ---- demo ----


def test_demo_checks_times_and_draws(capsys, tmp_path):
    picture = tmp_path / "demo.svg"
    tiny = ("--models", "Ti/16", "--image-size", 32, "--batches", 1, "--seconds", 0.1)
    status, out, err = run(capsys, "demo", *tiny, "--out", picture)
    assert status == 0, out + err
    assert "Ti/16" in out and "speed-up" in out and "ok" in out
    assert out.count(" engine ") == 2, "the demo shows what users get"
    assert str(picture) in out
    assert picture.read_text().startswith("<?xml")


QUICK_DEMO = ("--models", "Ti/16", "--image-size", 32, "--batches", 1, "--seconds", 0.1)


def test_demo_names_the_package_s_photograph(capsys, tmp_path):
    """A real photograph through real weights, in the text and in the picture."""
    status, out, err = run(capsys, "demo", *QUICK_DEMO, "--out", tmp_path / "demo.svg")
    assert status == 0, out + err
    (line,) = re.findall(r"^  cat\.jpg: (.*)$", out, re.MULTILINE)
    shares = re.findall(r"(\d+)% (\w+)", line)
    assert len(shares) == 3 and shares[0][1] == "cat" and int(shares[0][0]) > 50
    assert "small" in out and "32 x 32 pixels" in out and "knows 10 things" in out
    assert (tmp_path / "demo.svg").read_text().count("<image") == 1


def test_demo_names_given_photographs(capsys, tmp_path):
    """All in the text, as `vitkern predict` has them; the first three in the picture."""
    from vitkern import trained_file

    with PIL.open(trained_file.PHOTOGRAPH) as photograph:
        for i in range(4):
            photograph.rotate(90 * i).save(tmp_path / f"{i}.png")
    found = {}
    status, out, err = run(capsys, "demo", tmp_path, *QUICK_DEMO, "--out", tmp_path / "demo.svg")
    assert status == 0, out + err
    _, said, _ = run(capsys, "predict", tmp_path, "--top", 3, "--json")
    for answer in json.loads(said):
        name = answer["image"].rpartition("/")[2]
        found[name] = [f"{top['probability']:.0%} {top['label']}" for top in answer["top"]]
    assert len(found) == 4
    assert all(f"  {name}: {', '.join(top)}" in out for name, top in found.items())
    assert "cat.jpg" not in out
    assert (tmp_path / "demo.svg").read_text().count("<image") == 3


def test_demo_does_without_what_reads_its_model(capsys, monkeypatch, tmp_path):
    """torch alone is enough for the rest; a photograph that was named is another matter."""
    from vitkern import trained_file

    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    status, out, _ = run(capsys, "demo", *QUICK_DEMO, "--out", tmp_path / "demo.svg")
    assert status == 0 and "no photograph named" in out and "pip install" in out
    assert "speed-up" in out and (tmp_path / "demo.svg").exists()
    status, _, err = run(capsys, "demo", trained_file.PHOTOGRAPH, *QUICK_DEMO)
    assert status == 2 and "pip install" in err


def test_the_package_s_photograph_is_small():
    from vitkern import trained_file

    assert trained_file.PHOTOGRAPH.stat().st_size <= 20_000


def test_demo_leaves_out_what_would_take_too_long(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("vitkern.cli.demo.LONGEST_FORWARD_S", 0.0)
    tiny = ("--models", "Ti/16", "--image-size", "32", "--batches", "1", "--seconds", "0.1")
    status, out, _ = run(capsys, "demo", *tiny, "--out", tmp_path / "demo.svg")
    assert status == 0 and "PyTorch in bf16 was left out" in out
    assert len(re.findall(r"\d\.\d\dx", out.split("Median")[1])) == 2, "both speed-ups are there"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--out", "demo.bmp"), ".png or .svg"),
        (("--batches", "0"), "at least one image"),
        (("--models", "Q/16"), "unknown variant"),
        (("no-such-photograph.jpg",), "no-such-photograph.jpg: no such file"),
        ((__file__,), "not an image that Pillow can read"),
    ],
)
def test_demo_refuses(capsys, arguments, said):
    status, _, err = run(capsys, "demo", *arguments)
    assert status == 2
    assert said in err


# ---- classify ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Ti/16 for 32 x 32 images and 7 classes."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    safetensors.save_file(ViT("Ti/16", image_size=32, classes=7).state_dict(), path)
    return path


def test_classify_names_the_best(capsys, checkpoint, photo, tmp_path):
    names = tmp_path / "names.json"
    names.write_text(json.dumps({str(i): [f"n{i}", f"small_thing_{i}"] for i in range(7)}))
    status, out, _ = run(capsys, "classify", photo, "--weights", checkpoint, "--classes", names)
    assert status == 0
    assert out.count("small thing") == 5 and "%" in out


def test_classify_speaks_json(capsys, checkpoint, photo):
    status, out, _ = run(capsys, "classify", photo, photo, "--weights", checkpoint, "--json")
    first, second = json.loads(out)
    assert status == 0 and first == second
    assert [set(t) for t in first["top"]] == [{"index", "label", "probability"}] * 5


def test_classify_reads_torch_checkpoints(capsys, checkpoint, photo, tmp_path):
    from safetensors.torch import load_file

    path = tmp_path / "tiny.pt"
    torch.save({"model": load_file(checkpoint)}, path)
    answers = [run(capsys, "classify", photo, "--weights", p)[1] for p in (path, checkpoint)]
    assert answers[0] == answers[1]


def test_classify_reads_other_layouts(capsys, checkpoint, photo, tmp_path):
    import vitkern

    model = vitkern.load(checkpoint)
    vitkern.save(model, tmp_path / "hf", "huggingface")
    vitkern.save(model, tmp_path / "tv.safetensors", "torchvision")
    wanted = run(capsys, "classify", photo, "--weights", checkpoint)
    for path in (tmp_path / "hf", tmp_path / "tv.safetensors"):
        assert run(capsys, "classify", photo, "--weights", path) == wanted
    (tmp_path / "empty").mkdir()
    status, _, err = run(capsys, "classify", photo, "--weights", tmp_path / "empty")
    assert status == 2 and "is a directory" in err


def test_classify_goes_on_after_a_bad_image(capsys, checkpoint, photo, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(photo.read_bytes()[:200])
    text = tmp_path / "text.png"
    text.write_text("no image")
    paths = (tmp_path / "none.png", broken, text, photo)
    status, out, err = run(capsys, "classify", *paths, "--weights", checkpoint)
    assert status == 1
    assert str(photo) in out
    assert "none.png: no such file" in err
    assert "broken.png: broken image" in err
    assert "text.png: not an image" in err


def test_classify_refuses_enormous_images(capsys, checkpoint, photo, monkeypatch):
    monkeypatch.setattr(image_files, "LARGEST_PIXELS", 1000)
    status, _, err = run(capsys, "classify", photo, "--weights", checkpoint)
    assert status == 1
    assert "60 x 40 pixels are too many" in err


def test_classify_takes_long_thin_and_tiny_images(capsys, checkpoint, tmp_path):
    paths = []
    for size in ((1, 1), (1, 5000), (5000, 1), (3, 2)):
        paths.append(tmp_path / f"{size[0]}x{size[1]}.png")
        PIL.new("L", size, 128).save(paths[-1])
    assert run(capsys, "classify", *paths, "--weights", checkpoint)[0] == 0


@pytest.mark.parametrize(
    "case", ["absent", "broken", "foreign", "headless", "model", "top", "nan", "numbers"]
)
def test_classify_refuses(capsys, case, checkpoint, photo, tmp_path):
    path, extra = tmp_path / "w.pt", ()
    if case == "broken":
        path.write_bytes(b"not a checkpoint")
    elif case == "foreign":
        torch.save({"layer.weight": torch.zeros(2)}, path)
    elif case == "headless":
        torch.save(ViT("Ti/16", image_size=32, classes=0).state_dict(), path)
    elif case == "nan":
        bad = ViT("Ti/16", image_size=32, classes=5)
        torch.nn.init.constant_(bad.norm.bias, float("nan"))
        torch.nn.init.ones_(bad.head.weight)
        torch.save({"model": {f"module.{k}": v for k, v in bad.state_dict().items()}}, path)
    elif case == "numbers":
        torch.save({"pos_embed": 4, "patch_embed.proj.weight": 3}, path)
    elif case in ("model", "top"):
        path, extra = checkpoint, ("--model", "S/16") if case == "model" else ("--top", "0")
    said = {
        "absent": "there is no file",
        "broken": "w.pt is no checkpoint: it begins with b'not '",
        "nan": "192 of 192 elements of norm.bias are NaN",
        "numbers": "is no tensor",
        "foreign": "no layout that is known",
        "headless": "no classifier",
        "model": "is no S/16: its width is 192, not 384",
        "top": "at least one answer",
    }[case]
    status, _, err = run(capsys, "classify", photo, "--weights", path, *extra)
    assert status == 2
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize(
    "text", ["{", "3", "[]", json.dumps(["x"] * 9), json.dumps(["x"]), '{"a": "b"}']
)
def test_classify_refuses_other_class_names(capsys, checkpoint, photo, tmp_path, text):
    names = tmp_path / "names.json"
    names.write_text(text)
    status, _, err = run(capsys, "classify", photo, "--weights", checkpoint, "--classes", names)
    assert status == 2
    assert "names.json" in err


def test_classify_knows_an_espresso(capsys, shared_data):
    images_, weights = shared_data / "images", shared_data / "weights"
    status, out, _ = run(
        capsys,
        "classify",
        images_ / "free" / "coffee.png",
        "--weights",
        weights / "deit_tiny_patch16_224.timm.safetensors",
        "--classes",
        images_ / "imagenet_class_index.json",
    )
    assert status == 0
    assert "espresso" in out.splitlines()[1]


# ---- what the commands share ----


def test_turns_give_everybody_the_same_number():
    calls = []
    turns = Turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    spreads = turns.run(seconds=0.001)
    assert calls.count("a") == calls.count("b")
    assert len(turns.samples["a"]) == len(turns.samples["b"]) >= 3
    assert spreads["a"].p20 <= spreads["a"].median <= spreads["a"].p80


def test_spread_of_one_sample():
    assert Spread.of([1e-6]) == (1.0, 1.0, 1.0)


def test_picture_without_matplotlib_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        charts.pyplot()


def test_bench_names_what_its_own_process_would_miss(tmp_path, capsys, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "test_operators.py").touch()
    assert main(["bench", "--suite", "--source", str(tmp_path)]) == 2
    assert f"is not built: pip install -e '{tmp_path}[test]'" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--suite", "--source", str(tmp_path)]) == 2
    assert "the benchmarks need pytest" in capsys.readouterr().err
