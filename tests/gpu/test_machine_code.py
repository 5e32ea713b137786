"""What is read from machine code: instructions, loops, ceilings, and the gates on them."""

import dataclasses
import functools
import re

import pytest
import torch

from tests.conftest import ROOT

pytest.importorskip("triton")
from tests.gpu.aot_kernels import matmul_variant, plain_variant
from vitkern.engines.trace import Case, launches
from vitkern.gpu import configs, hardware, rotary
from vitkern.gpu.aot import build as aot
from vitkern.gpu.aot import disassembly, machine_code
from vitkern.gpu.aot.excuses import EXCUSED, Excuse, excuses
from vitkern.gpu.aot.label import is_promised
from vitkern.gpu.gemm_backward import input_gradient_kernel, weight_gradient_kernel
from vitkern.gpu.launch import Recorder, executing
from vitkern.gpu.linear_residual import linear_residual_forward

ARCHS = ("sm_80", "sm_90", "sm_120", "gfx942")


@functools.cache
def checked(arch, **settings) -> aot.Checked:
    variant = matmul_variant(arch, **settings)
    return aot.check(variant, aot.compile_variant(variant, arch))


# ---- reports and gates ----


@pytest.mark.parametrize("arch", ARCHS)
def test_a_good_kernel_passes_the_gates(arch):
    _, _, report, broken, _ = checked(arch)
    assert broken == []
    assert report.spills[0] == 0 and report.tensor[0] > 0
    assert report.occupancy.blocks >= 1
    assert report.loads.wide >= report.asked.loads == (128 + 128) * 32 * 2
    assert report.asked.stores == 128 * 128 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "tf32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_flops_of_the_machine_code_are_those_of_the_source(arch, dtype):
    """mma.sync, wgmma and tcgen05 are decoded rightly: a trip multiplies 128 x 128 x 32."""
    report = checked(arch, dtype=dtype).report
    assert report.asked.flops == report.flops == 2 * 128 * 128 * 32
    family = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[arch]
    assert report.mix[family] == report.tensor[0]
    assert 0 < report.ceiling <= 1


def test_ceiling_of_a_plain_matmul_is_the_tensor_cores():
    """A100: a 128 x 128 tile reads 96 bytes a clock of shared memory, below its 128."""
    report = checked("sm_80").report
    assert report.bound == "tensor" and report.ceiling == 1
    assert report.clocks["tensor"] == 2 * 128 * 128 * 32 / 2048
    assert report.clocks["shared memory"] == 0.75 * report.clocks["tensor"]
    assert report.feed == pytest.approx((128 + 128) * 32 * 2 / 512)


def test_gate_on_spills():
    _, _, report, broken, _ = checked("sm_80", BM=128, BN=256)  # 256 sums a thread
    assert any(rule.startswith("spills:") for rule in broken), report


def test_gate_on_tensor_instructions():
    """Plain fp32 needs none; where the source multiplies bf16 their absence is found."""
    _, _, report, broken, _ = checked("sm_80", dtype=torch.float32, precision="ieee", BM=64, BN=64)
    assert report.tensor == (0, 0) and report.asked.dots == 0 and broken == []
    wanting = dataclasses.replace(report, asked=checked("sm_80").report.asked)
    assert machine_code.gates(wanting)[0].startswith("tensor: 1 matmuls")


def test_gate_on_shared_memory():
    _, _, report, broken, _ = checked("sm_120", stages=8)
    assert report.shared > 99 * 1024
    assert [rule.partition(":")[0] for rule in broken] == ["shared memory", "occupancy"]


def test_autocast_s_weight_gradients_fit_into_little_shared_memory():
    """A block of sm_89 has 99 KB, of which rows of a gradient in fp32 take twice their share."""
    case = Case("B/16", "autocast-bf16", 64, training=True)
    tiles = {}
    for one in launches(case, "sm_89"):
        constants, kinds = dict(one.variant.constants), dict(one.variant.signature)
        if one.variant.kernel is weight_gradient_kernel and kinds["grad"] == "*fp32":
            tiles[constants["BM"] * constants["BN"]] = one.variant
    largest = tiles[max(tiles)]
    assert aot.check(largest, aot.compile_variant(largest, "sm_89")).broken == []


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_120"])
def test_odd_channels_do_not_spill(arch):
    """EVA-02 L's 2730: with steps of 64 along them the largest tile spilled 33 instructions."""
    case = Case("eva02_large_patch14_224", "bf16", 8)
    found = {
        one.variant
        for one in launches(case, arch, tile=0)
        if one.kernel is linear_residual_forward and one.arguments["K"] == 2730
    }
    for variant in found:
        report = aot.check(variant, aot.compile_variant(variant, arch)).report
        assert report.spills == (0, 0) and report.ceiling == 1
    assert found


def test_gelu_s_input_gradients_do_not_spill_on_amd(monkeypatch):
    """With LayerScale in fp16: three stages took all of the shared memory, and spilled.

    So in the last block of a model that pools the mean of all rows, or has dropout.
    """
    monkeypatch.setattr("vitkern.model.rows_read", lambda model: None)
    case = Case("deit3_base_patch16_224", "autocast-fp16", 64, training=True)
    found = {
        one.variant
        for one in launches(case, "gfx942")
        if one.kernel is input_gradient_kernel and one.arguments["ACTIVATION"] == "gelu"
    }
    (scaled,) = (
        v for v in found if dict(v.signature).get("gamma") and v.signature[0][1] == "*fp16"
    )
    _, _, report, broken, _ = aot.check(scaled, aot.compile_variant(scaled, "gfx942"))
    assert broken == [] and report.shared <= 32 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_pairs_of_neighbours_are_turned_by_wide_accesses(dtype):
    """EVA-02's: each channel of a pair by itself would be accesses of 32 or 64 bits."""
    qkv = torch.empty(2, 5, 3, 2, 64, dtype=dtype, device="meta")
    table = torch.empty(1, 5, 64, device="meta")
    with executing(Recorder("sm_89")) as recorder:
        rotary.forward(None, (torch.empty_like(qkv),), qkv, table, half=False)
    (found,) = recorder.launches
    assert is_promised(found.variant)
    _, _, report, broken, _ = aot.check(found.variant, aot.compile_variant(found.variant, "sm_89"))
    assert broken == [] and report.loads.narrow == report.stores.narrow == 0


def test_gate_on_narrow_accesses():
    """Rows of 767 elements promise nothing: narrow loads are then no fault, and else they are."""
    variant = matmul_variant("sm_80", K=767, BM=64, BN=64)
    assert not is_promised(variant)
    label, _, report, broken, _ = aot.check(variant, aot.compile_variant(variant, "sm_80"))
    assert "odd sizes" in label and broken == []
    assert [rule.partition(":")[0] for rule in machine_code.gates(report)] == ["loads"]


def test_excuses_are_for_one_rule(monkeypatch):
    report = checked("sm_120", stages=8).report
    monkeypatch.setattr(machine_code, "EXCUSED", (Excuse("matmul", "occupancy", "known"),))
    assert [rule.partition(":")[0] for rule in machine_code.gates(report)] == ["shared memory"]


def test_excuses_are_for_one_row_of_one_architecture(monkeypatch):
    variant = matmul_variant("sm_120", stages=8)
    binary = aot.compile_variant(variant, "sm_120")
    for pattern, left in (
        (r"matmul, bf16, .* 8 stages.* on sm_120", ["occupancy"]),
        (r"matmul, bf16, .* 3 stages.* on sm_120", ["shared memory", "occupancy"]),
        (r"matmul, bf16, .* on sm_80", ["shared memory", "occupancy"]),
        (r"matmul,(?!.* without .*bias)", ["occupancy"]),
    ):
        known = (Excuse(pattern, "shared memory", "known"),)
        monkeypatch.setattr(machine_code, "EXCUSED", known)
        broken = aot.check(variant, binary).broken
        assert [rule.partition(":")[0] for rule in broken] == left, pattern


def test_an_excuse_for_spills_has_a_limit(monkeypatch):
    report = checked("sm_80").report

    def broken(count, *known):
        monkeypatch.setattr(machine_code, "EXCUSED", known)
        spilt = dataclasses.replace(report, spills=(count, count))
        return machine_code.gates(spilt, label="matmul, bf16")

    one, other = (Excuse(".*bf16.* on sm_80", "spills", "known", most) for most in (20, 5))
    assert broken(20, one) == broken(20, other, one) == broken(0) == []
    assert broken(21, one) == ["spills: 21 instructions in the hot loop, 20 are excused"]
    assert broken(1) == ["spills: 1 instructions in the hot loop"]
    assert broken(1, Excuse("matmul", "loads", "known", 20)), "of another rule"


@pytest.mark.parametrize("one", EXCUSED, ids=lambda one: f"{one.kernels} {one.rule}")
def test_every_excuse_names_its_reason_and_its_limit(one):
    assert one.why and re.compile(one.kernels)
    assert (one.most > 0) == (one.rule == "spills")


def test_kernels_without_matmuls_have_no_tensor_gate():
    variant = plain_variant("sm_80")
    _, _, report, broken, _ = aot.check(variant, aot.compile_variant(variant, "sm_80"))
    assert broken == [] and report.ceiling is None and report.bound == ""
    assert report.loads == (4096, 0) and report.stores == (4096, 0)


@pytest.mark.parametrize(
    "arch, registers, shared, warps, blocks, limiter",
    [
        ("sm_80", 128, 0, 4, 4, "registers"),
        ("sm_80", 255, 0, 4, 2, "registers"),
        ("sm_80", 32, 48 * 1024, 4, 3, "shared memory"),
        ("sm_80", 32, 164 * 1024, 4, 0, "shared memory"),
        ("sm_86", 16, 0, 1, 16, "blocks"),
        ("sm_90", 32, 0, 8, 8, "registers"),
        ("sm_90", 24, 0, 8, 8, "warps"),
        ("gfx942", 128, 0, 4, 4, "registers"),
        ("gfx942", 512, 0, 4, 1, "registers"),
        ("gfx942", 64, 40000, 4, 1, "shared memory"),
    ],
)
def test_occupancy(arch, registers, shared, warps, blocks, limiter):
    found = hardware.occupancy(arch, registers, shared, warps)
    assert found.blocks == blocks
    assert found.limiter == limiter or blocks == hardware.CHIPS[arch].warps // warps


def test_every_architecture_has_its_hardware():
    assert set(hardware.CHIPS) == set(configs.ARCHS)


SASS = """
kernel:
.text.kernel:
        /*0000*/                   MOV R1, 0x10 ;
        /*0010*/               @P3 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @!PT LDS RZ, [RZ] ;
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R8 ;
        /*0050*/              @!P1 BRA `(.L_x_3) ;
.L_x_4:
        /*0060*/                   LDG.E.128 R16, desc[UR6][R2.64] ;
        /*0070*/                   BRA.U UP0, `(.L_x_1) ;
.L_x_2:
        /*0080*/                   STG.E.64 desc[UR6][R2.64], R4 ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R8 ;
        /*00b0*/              @!P1 BRA `(.L_x_3) ;
        /*00c0*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*00d0*/                   BRA `(.L_x_5);
"""


def test_loops_are_found_with_the_stubs_behind_the_end():
    blocks = disassembly.parse_sass(SASS)
    loops = sorted(disassembly.loops(blocks), key=len)
    names = [[one.name for i in sorted(loop) for one in blocks[i].code] for loop in loops]
    assert names[0] == ["SYNCS", "BRA"]  # a warp that waits
    assert names[1][:2] == ["HMMA", "LDS"] and "STG" not in names[1] and "LDG" in names[1]
    hot, trips = machine_code._hot(blocks, lambda one: one.name == "HMMA", lambda one: 0)
    assert len(trips) == 1 and [one.name for one in hot].count("HMMA") == 1
    assert not any(one.name == "LDS" for one in hot)  # it never runs


@pytest.mark.parametrize(
    "opcode, operands, flops, bytes_read",
    [
        ("HMMA.16816.F32.BF16", "R4, R8, R12, R4", 4096, 0),
        ("HMMA.1688.F32.TF32", "R4, R8, R12, R4", 2048, 0),
        ("HGMMA.64x256x16.F32.BF16", "R24, gdesc[UR8], R24", 131072, (64 + 256) * 8),
        ("HGMMA.64x128x16.F32.BF16", "R24, R4, gdesc[UR8], R24, gsb0", 65536, 128 * 8),
        ("UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR2], idesc[0x8200490], UPT",
         2 * 128 * 128 * 16 / 4, 256 * 8),
        ("UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR2], idesc[UR9], UPT", 0, 0),
    ],
)  # fmt: skip
def test_matmuls_of_tensor_instructions(opcode, operands, flops, bytes_read):
    found = machine_code.matmul_of(disassembly.Instruction("", opcode, operands), warps=4)
    assert (found.flops, found.shared) == (flops, bytes_read)
    assert machine_code.matmul_of(disassembly.Instruction("", "FFMA", "R1, R2"), 4) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernels_disassembled_together_are_as_each_alone(arch):
    """nvdisasm's own listing of a cubin is the measure: the same instructions, blocks and loops."""
    variants = matmul_variant(arch), plain_variant(arch), matmul_variant(arch, K=200)
    codes = [aot.compile_variant(variant, arch).code for variant in variants]
    for code, listing in zip(codes, disassembly.sass(codes, arch), strict=True):
        alone = disassembly.parse_sass(disassembly._tool("nvdisasm", "-c", "-ndf", binary=code))
        found = disassembly.parse_sass(listing)
        assert list(map(names, found)) == [names(block) for block in alone if block.code]
        assert disassembly.loops(found) == disassembly.loops(alone)


def names(block):
    """Its instructions but for the names of labels."""
    return [(one.predicate, one.opcode, one.operands.partition("`(")[0]) for one in block.code]


def test_tools_that_cannot_read_a_binary_say_so():
    with pytest.raises(RuntimeError, match="cannot read this binary"):
        disassembly.sass([b"no cubin"], "sm_80")


# ---- make gpu-check ----


@pytest.fixture
def tool(monkeypatch):
    folder = ROOT / "tools"
    monkeypatch.syspath_prepend(str(folder))
    import gpu_check

    return gpu_check


def test_the_page_says_what_made_it_and_lists_architectures_in_order(tool):
    page = tool.page([checked("sm_90"), checked("sm_80"), checked("gfx942")])
    assert tool.PAGE.read_text().startswith(tool.TITLE) and page.startswith(tool.TITLE)
    assert "`python tools/gpu_check.py --shown`" in tool.TITLE
    assert page.index("sm_80") < page.index("sm_90") < page.index("gfx942")
    assert "| 100% | tensor |" in page


def test_complaints_name_gate_and_kernel(tool):
    (failed,) = tool.complaints(aot.Failure("id", "sm_80", "why"))
    shared, occupancy = tool.complaints(checked("sm_120", stages=8))
    assert failed == "FAILED sm_80 id: why"
    assert shared.startswith("GATE sm_120 matmul") and "shared memory" in shared
    assert "occupancy" in occupancy


def test_whole_builds_are_kept_by_architecture(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "BUILDS", tmp_path / "builds.jsonl")
    assert tool.whole_builds() == ""
    entries = [{"bytes": 3_000_000}] * 2
    for failures in ([aot.Failure("id", "sm_90", "why")], []):
        result = aot.Result(tmp_path, entries=entries, failures=failures, seconds=120)
        tool.record("sm_90", result, ["FAILED", "GATE"][: 2 * len(failures)])
    tool.record("sm_80", result, [])
    assert [row["failed"] for row in tool.recorded().values()] == [0, 0], "the newest of each"
    lines = tool.whole_builds().splitlines()[-2:]
    assert lines[0].startswith("| sm_80 | 2 | 6 MB | 0 | 0 | 2 min |")
    assert lines[1].startswith("| sm_90 |")


def test_a_whole_build_leaves_the_kernels_of_the_page(tool, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(tool.PAGE.read_text())
    monkeypatch.setattr(tool, "PAGE", page)
    monkeypatch.setattr(tool, "BUILDS", tmp_path / "builds.jsonl")
    kernels, _, _ = page.read_text().partition("## Whole builds")
    tool.record("sm_90", aot.Result(tmp_path, seconds=120), [])
    tool.write_builds()
    assert page.read_text() == kernels.rstrip("\n") + "\n" + tool.whole_builds()
    assert page.read_text().count("| sm_90 | 0 |") == 1


def test_floors_of_ceilings_and_the_use_of_excuses(tool, monkeypatch):
    one = checked("sm_80")
    percent = f"{one.report.ceiling:.0%}"
    assert tool.low_ceilings([one]) == []
    monkeypatch.setattr(tool, "FLOORS", {"sm_80": {"matmul": 1.01}})
    (low,) = tool.low_ceilings([one])
    assert low.startswith("CEILING sm_80 matmul") and low.endswith(f"{percent}, 101% at least")
    known = Excuse("matmul, .* on sm_80", "spills", "known", 9)
    monkeypatch.setattr(tool, "excuses", lambda named, rule: excuses(named, rule, [known]))
    assert tool.low_ceilings([one]) == [], "low because it spills"
    spilt = one._replace(report=dataclasses.replace(one.report, spills=(4, 4)))
    assert tool.worst_excused([one, spilt, one]) == [f"excused: 4 of 9 spills, {known.kernels}"]
