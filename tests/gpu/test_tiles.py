"""The GEMMs' tiles: which one is chosen, and that results do not depend on the choice."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.interpreter import Interpreter
from tests.evidence.ptx import PtxExecutor
from tests.model.tiny_models import tiny
from vitkern.engines import trace
from vitkern.engines.gpu import GpuEngine
from vitkern.gpu import configs, gemm, hardware, moments, tiles
from vitkern.gpu.gemm_backward import weight_gradient
from vitkern.gpu.launch import Recorder, executing
from vitkern.gpu.linear_residual import residual_linear
from vitkern.gpu.norm_linear import folded_linear
from vitkern.gpu.patch_embed import embed
from vitkern.precision import PRECISIONS

BITS = {"bf16": 16, "fp16": 16, "tf32": tiles.TF32, "fp32": 32}


class Device(Interpreter):
    """The interpreter with a number of processors, or with one tile for all GEMMs."""

    def __init__(self, arch, processors=None, tile=None):
        super().__init__(arch)
        self.processors, self.tile = processors, tile


def logits(model, image, precision, device):
    engine = GpuEngine(model, precision, device)
    y = torch.empty(image.shape[0], model.config.classes, dtype=model.dtype)
    with torch.no_grad(), executing(device):
        device.tf32 = precision == "tf32"
        engine.start("logits", image, y)
    return y


def _some(arch, precision):
    usual = (arch, precision) in (("sm_80", "bf16"), ("sm_90", "bf16"), ("sm_80", "tf32"))
    return pytest.param(arch, precision, marks=[] if usual else [pytest.mark.full])


@pytest.mark.parametrize(
    "arch, precision",
    [_some(*pair) for pair in itertools.product(("sm_80", "sm_90", "gfx942"), BITS)],
)
def test_every_tile_gives_the_same_bits(arch, precision):
    """Also the statistics of LayerNorm, which the tiles' programs leave for their readers."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    model = tiny(dtype).eval()
    c = model.config
    sides = c.image_size if isinstance(c.image_size, tuple) else (c.image_size, c.image_size)
    image = torch.randn(2, c.channels, *sides).to(dtype)
    count = len(tiles.fitting("folded_linear", arch, BITS[precision]))
    assert count > 1
    first, *others = (
        logits(model, image, precision, Device(arch, tile=tile)) for tile in range(count)
    )
    for other in others:
        assert torch.equal(other, first)


class Emulated(PtxExecutor):
    def __init__(self, tile, tf32):
        super().__init__("sm_80")
        self.tile, self.tf32 = tile, tf32


@pytest.mark.parametrize(
    "precision, every",
    [("bf16", 3), *(pytest.param(name, 1, marks=pytest.mark.full) for name in BITS)],
)
def test_every_tile_gives_the_same_bits_as_compiled(precision, every):
    """Layouts differ from tile to tile, and with them what a thread adds to what of another's."""
    dtype, M, N, K = PRECISIONS[precision].dtype, 40, 96, 64
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g)
    x, weight, residual = x.to(dtype), weight.to(dtype), 10 + torch.randn(M, N, generator=g)
    sums, shift = torch.randn(K, generator=g), torch.randn(K, generator=g)
    found = []
    for tile in range(0, len(tiles.fitting("linear_residual", "sm_80", BITS[precision])), every):
        y, parts, z = torch.empty(M, N, dtype=dtype), torch.empty(3, M, 2), torch.empty(M, K)
        with executing(Emulated(tile, precision == "tf32")):
            residual_linear(x, weight, None, residual, None, y, parts)
            back = weight.t().contiguous()
            folded_linear(y, parts, moments.WIDTH, back, sums, shift, z, "gelu", 1e-6)
        found.append((y, parts, z))
    assert len(found) > 1
    for others in zip(*found, strict=True):
        assert all(torch.equal(one, others[0]) for one in others)


@pytest.mark.full
def test_every_row_for_patches_gives_the_same_bits_as_compiled(monkeypatch):
    """Their steps differ on sm_80; its tensor instructions add 16 terms at a time all the same."""
    g = torch.Generator().manual_seed(0)
    image, weight = torch.randn(1, 3, 32, 32, generator=g), torch.randn(64, 3, 16, 16, generator=g)
    image, weight, prefix = image.bfloat16(), weight.bfloat16(), torch.randn(1, 64, generator=g)
    rows = [
        row
        for row in configs.TABLE["patch_embed_forward"]
        if "sm_80" in row.archs and 16 in row.bits
    ]
    assert len({row.blocks["BK"] for row in rows}) == 2
    found = []
    for row in (rows[0], rows[-1]):
        y, parts = torch.empty(1, 5, 64, dtype=torch.bfloat16), torch.empty(2, 5, 2)
        monkeypatch.setitem(configs.TABLE, "patch_embed_forward", (row._replace(upto={}),))
        with executing(Emulated(None, False)):
            embed(y, image, weight, None, prefix, None, None, None, moments=parts)
        found.append((y, parts))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_a_sample_does_not_depend_on_its_batch(arch):
    """On a GPU of four processors, where two batches of a tiny model get different tiles."""
    model = tiny(torch.bfloat16, width=256, heads=4).eval()
    c = model.config
    sides = c.image_size if isinstance(c.image_size, tuple) else (c.image_size, c.image_size)
    image = torch.randn(8, c.channels, *sides).bfloat16()
    chosen = {
        tuple(tiles.choose("linear_residual", arch, 16, B * c.tokens, c.width, 4).blocks.items())
        for B in (1, 8)
    }
    assert len(chosen) == 2, "the test needs sizes with different tiles"
    whole = logits(model, image, "bf16", Device(arch, processors=4))
    for alone in (image[:1], image[5:6], image[2:5]):
        found = logits(model, alone, "bf16", Device(arch, processors=4))
        at = next(i for i in range(8) if torch.equal(image[i], alone[0]))
        assert torch.equal(found, whole[at : at + len(alone)])


@pytest.mark.parametrize("arch", configs.ARCHS)
@pytest.mark.parametrize(
    "kernel, bits", [*itertools.product(tiles.TILES, (16, tiles.TF32, 32, tiles.MIXED))]
)
@pytest.mark.parametrize("odd", [False, True], ids=["multiples", "odd"])
def test_tiles_differ_in_what_does_not_change_results_alone(arch, kernel, bits, odd):
    rows = tiles.fitting(kernel, arch, bits, odd)
    assert len({row.blocks["BK"] for row in rows}) == 1, "the order of the sum over K"
    if arch in ("sm_90", "sm_100"):  # wgmma and tcgen05; a smaller tile would be mma.sync
        assert min(row.blocks["BM"] for row in rows) >= 64
    assert min(row.blocks["BN"] for row in rows) >= 32, "the columns of a part of the moments"
    sizes = [(row.blocks["BM"] * row.blocks["BN"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True), "the first of equal rows is the largest"
    assert all(0 < row.rate <= 1 for row in rows)


def test_the_device_s_processors_decide():
    weight = torch.empty(768, 768, dtype=torch.bfloat16)
    found = []
    for processors in (16, 132):
        with executing(Device("sm_90", processors)):
            found.append(gemm.tile_for("linear_residual", weight, weight, 1576, 768).blocks)
    assert found[0]["BM"] * found[0]["BN"] > found[1]["BM"] * found[1]["BN"]
    with executing(Interpreter("sm_90")):  # no number: the usual board's
        usual = gemm.tile_for("linear_residual", weight, weight, 1576, 768).blocks
    assert hardware.CHIPS["sm_90"].processors == 132 and usual == found[1]


@pytest.mark.parametrize(
    "arch, precision",
    [("sm_80", "bf16"), *(pytest.param("sm_90", p, marks=pytest.mark.full) for p in BITS)],
)
def test_the_ahead_of_time_list_has_every_tile_that_can_be_chosen(arch, precision):
    built = {variant.name for variant in trace.variants(arch, (precision,), ("S/16",))}
    for batch, processors in itertools.product((1, 3, 17), (20, 132, 304)):
        recorder = Recorder(arch, trace.MIXTURES[precision].tf32, processors)
        case = trace.Case("S/16", precision, batch)
        for source in trace.SOURCES:
            source(case, recorder)
        missing = {one.variant.name for one in recorder.launches} - built
        assert not missing, (batch, processors)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_weight_gradients_in_every_tile_and_in_shares(arch):
    g = torch.Generator().manual_seed(0)
    grad, x = torch.randn(200, 48, generator=g), torch.randn(200, 80, generator=g)
    grad, x, weight = grad.bfloat16(), x.bfloat16(), torch.empty(48, 80, dtype=torch.bfloat16)
    exact = grad.double().t() @ x.double()
    ways = tiles.sharings(arch, 16, False)
    assert {way.shares for way in ways} == {1, 2} and len(ways) > 3
    for tile in range(len(ways)):
        with executing(Device(arch, tile=tile)):
            found, _, _ = weight_gradient(grad, x, weight, None, None)
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0.02)


def test_rows_are_shared_where_the_shares_bytes_pay():
    for arch in configs.ARCHS:  # B/16 at batch 8: no fp32 shares but for the smallest weight's
        for N, K in ((2304, 768), (3072, 768), (768, 3072)):
            assert tiles.share(arch, 16, 8 * 197, N, K).shares == 1
        assert tiles.share(arch, 16, 256 * 197, 384, 384).shares > 2  # 9 tiles, 50,000 rows
        assert tiles.share(arch, 16, 0, 768, 768).shares == 1


def test_arithmetic_of_waves():
    row = configs.Row({"BM": 128, "BN": 256, "BK": 64}, 8, 3, "")
    assert tiles.programs(row, 591, 768) == 15
    assert tiles.waves(row, 591, 768, 132) == 1 and tiles.waves(row, 591, 768, 14) == 2
    assert tiles.filled(row, 128, 256, 1) == 1
    assert tiles.filled(row, 591, 768, 132) == pytest.approx(591 * 768 / (132 * 128 * 256))
    compute = 2 * 128 * 256 / 4096
    assert tiles.clocks(row, "sm_90", 16, 128, 256, 132) == compute
    assert tiles.clocks(row, "sm_90", 16, 128 * 132, 256, 132) > compute  # all read L2 at once
