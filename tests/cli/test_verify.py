"""`vitkern verify`: a certificate of this machine, and a violation is never overlooked."""

import json
import re

import pytest
import torch

from vitkern import ViT, ViTConfig, cpu
from vitkern.__main__ import main
from vitkern.contract import SLACK, Error
from vitkern.registry import REGISTRY
from vitkern.verification import certificate, models
from vitkern.verification import run as checks
from vitkern.verification.tf32 import Tf32, round_to_tf32

LAYERNORM = ("--operator", "layernorm", "--model", "none", "--quick")
TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=3, mlp_width=96, classes=7)
HERE = checks.Device(torch.device("cpu"), (cpu.isa(),))


def verify(capsys, *arguments):
    status = main(["verify", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def wrong_layernorm(monkeypatch):
    """A kernel whose result is off by a thousandth."""
    right = cpu.layernorm

    def wrong(n, results, *args, **kwargs):
        right(n, results, *args, **kwargs)
        results[0].mul_(1.001)

    monkeypatch.setattr(cpu, "layernorm", wrong)


# ---- the verdict ----


def test_a_right_kernel_is_status_0(capsys):
    status, out, _ = verify(capsys, *LAYERNORM)
    assert status == 0, out
    assert len(re.findall(r"^layernorm +(?:forward|gradients) .* ok$", out, re.M)) == 4
    assert "keep the error contract" in out


def test_a_wrong_kernel_is_status_1(capsys, wrong_layernorm):
    status, out, _ = verify(capsys, *LAYERNORM, "--precision", "fp32")
    assert status == 1
    assert "TOO LARGE" in out and "break the error contract" in out
    assert "layernorm forward y" in out, "the result is named"


def test_a_wrong_instruction_set_is_found_beside_right_ones(capsys, monkeypatch):
    """All sets are right but one, which the call does not use by itself."""
    right, bad = cpu.layernorm, cpu.operator_isas()[-1]

    def wrong(n, results, *args, isa="", **kwargs):
        right(n, results, *args, isa=isa, **kwargs)
        if isa == bad:
            results[0].mul_(1.001)

    monkeypatch.setattr(cpu, "layernorm", wrong)
    if bad != cpu.operator_isa(cpu.isa()):
        assert verify(capsys, *LAYERNORM, "--precision", "fp32")[0] == 0
    status, out, _ = verify(capsys, *LAYERNORM, "--precision", "fp32", "--isa", "all")
    assert status == 1
    (line,) = [line for line in out.splitlines() if "TOO LARGE" in line]
    assert bad in line


def test_a_kernel_that_fails_is_a_violation(capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(cpu, "layernorm", fail)
    status, out, _ = verify(capsys, *LAYERNORM, "--precision", "bf16")
    assert status == 1 and "RuntimeError: out of registers" in out


def model_rows(precisions):
    torch.manual_seed(0)
    model = ViT(TINY).eval()
    subject = models.Logits(model, models.images(model))
    found = []
    for precision in precisions:
        run = {"": lambda p=precision: {"": subject.judge(p)}}[""]
        check = checks.Check("model", "tiny", "logits", "", precision, cpu.isa(), SLACK, run)
        found += checks.carry_out(check, HERE)
    return model, subject, found


def test_a_model_keeps_the_contract_at_every_precision():
    _, _, rows = model_rows(("fp32", "bf16", "int8"))
    assert [row.problem for row in rows] == ["", "", ""]
    assert all(0 < row.share <= 1 for row in rows)


@pytest.mark.parametrize("precision, factor", [("fp32", 1e-4), ("bf16", 0.1), ("int8", 1.0)])
def test_a_model_that_is_off_is_found(precision, factor, monkeypatch):
    right = models.Logits.ours
    monkeypatch.setattr(models.Logits, "ours", lambda *a: right(*a) * (1 + factor))
    _, _, (row,) = model_rows((precision,))
    assert row.problem and row.share > 1


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_a_wrong_gradient_of_a_training_step_is_found(precision, monkeypatch):
    torch.manual_seed(0)
    model = ViT(TINY)
    pixels = models.images(model)
    assert models.judge_step(model, pixels, precision).passed
    right = models.joint_error

    def worse(got, truth):
        """What the fused operators give, with one parameter's gradient doubled."""
        name = "blocks.0.mlp.fc1.weight"
        if worse.calls == 0:
            got = {**got, name: 2 * got[name]}
        worse.calls += 1
        return right(got, truth)

    worse.calls = 0
    monkeypatch.setattr(models, "joint_error", worse)
    assert not models.judge_step(model, pixels, precision).passed


def test_nan_is_no_pass(monkeypatch):
    right = models.Logits.ours
    monkeypatch.setattr(models.Logits, "ours", lambda *a: right(*a) * float("nan"))
    _, _, (row,) = model_rows(("fp32",))
    assert "NaN" in row.problem


# ---- what is checked ----


def test_every_row_of_the_table_is_checked_forward_and_backward():
    plan = list(checks.operator_checks(list(REGISTRY), ("fp32", "bf16"), HERE, quick=True))
    seen = {(one.name, one.part, one.precision) for one in plan}
    wanted = {
        (name, part, precision)
        for name in REGISTRY
        for part in ("forward", "gradients")
        for precision in ("fp32", "bf16")
    }
    assert seen == wanted
    whole = list(checks.operator_checks(list(REGISTRY), ("fp32",), HERE, quick=False))
    assert len(whole) > 4 * len(REGISTRY)


def test_a_model_is_checked_on_every_set_that_is_asked_for():
    where = checks.Device(torch.device("cpu"), tuple(cpu.isas()))
    plan = list(checks.model_checks("Ti/16", 32, ("fp32", "bf16", "int8"), where))
    logits = {(one.precision, one.isa) for one in plan if one.part == "logits"}
    assert logits == {(p, isa) for p in ("fp32", "bf16", "int8") for isa in cpu.isas()}
    assert {one.precision for one in plan if one.part == "training step"} == {"fp32", "bf16"}


def test_the_yardstick_of_tf32_rounds_factors_and_nothing_else():
    torch.manual_seed(0)
    a, b = torch.randn(7, 33), torch.randn(33, 5)
    with torch.no_grad(), Tf32():
        got, added = torch.nn.functional.linear(a, b.T), a + 1e-6
    assert torch.equal(got, round_to_tf32(a) @ round_to_tf32(b))
    assert torch.equal(added, a + 1e-6)
    assert Error.of(got, a.double() @ b.double()).rms > 1e-4


# ---- the certificate ----


def test_a_certificate_is_saved_with_its_machine(capsys, tmp_path):
    prefix = tmp_path / "new" / "mine"
    status, out, _ = verify(capsys, *LAYERNORM, "--save", prefix)
    assert status == 0 and str(prefix) in out
    text = prefix.with_suffix(".md").read_text()
    found = json.loads(prefix.with_suffix(".json").read_text())
    assert found["passed"] and found["machine"]["torch"] == torch.__version__ in text
    assert found["command"] == "vitkern verify --model none --operator layernorm --quick"
    assert found["command"] in text and found["date"] in text
    assert {"worst", "rms"} == found["checks"][0]["ours"].keys()


def test_json_is_for_programs(capsys, wrong_layernorm):
    status, out, _ = verify(capsys, *LAYERNORM, "--precision", "fp32", "--json")
    found = json.loads(out)
    assert status == 1 and not found["passed"]
    assert [one["passed"] for one in found["checks"] if one["result"] == "y"] == [False]


def test_a_row_shows_the_check_nearest_to_its_limit():
    row = checks.Checked(
        "operator", "op", "forward", "y", "M3", "fp32", "avx2", SLACK,
        Error(1e-6, 1e-7), Error(1e-6, 1e-7), 0.5, "",
    )  # fmt: skip
    near = row._replace(ours=Error(1.9e-6, 1e-7), share=0.9)
    bad = row._replace(ours=Error(9e-6, 1e-7), share=4.0, problem="too large")
    (line,) = certificate.lines([row, near])
    assert (line.checks, line.verdict, round(line.worst, 2)) == (2, "ok", 1.9)
    (line,) = certificate.lines([bad, near])
    assert line.verdict == "TOO LARGE" and round(line.worst) == 9


def test_nothing_checked_is_no_pass():
    assert not certificate.Certificate.of([], {}, 0.0, "").passed


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--operator", "mlp,softmax"), "--operator softmax: the table has"),
        (("--isa", "mmx"), "--isa mmx: this CPU and this build have"),
        (("--model", "Q/16", "--operator", "none"), "unknown variant"),
        (("--model", "none", "--operator", "none"), "nothing is left to check"),
        (("--model", "none", "--precision", "int8"), "nothing is left to check"),
        (("--image-size", "0"), "at least one pixel"),
        (("--save", "."), "is a folder"),
        (("--device", "tpu"), "give cpu, cuda"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys, arguments, said):
    status, _, err = verify(capsys, *arguments)
    assert status == 2 and said in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [("--precision", "fp8"), ("--model", ","), ("--operator", "")]
)
def test_what_is_misspelt_is_refused(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    assert stop.value.code == 2 and arguments[0] in capsys.readouterr().err
