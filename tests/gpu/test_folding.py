"""LayerNorm folded into a GEMM keeps the contract, whatever the rows' mean, scale and outliers."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.evidence.interpreter import Interpreter
from tests.evidence.ptx import PtxExecutor
from vitkern.contract import judge
from vitkern.gpu import launch, linear_residual, moments, norm_linear
from vitkern.gpu.launch import executing
from vitkern.precision import PRECISIONS

M, K, N, EPS = 40, 384, 48, 1e-6
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# What the residual stream is held in, and the precision that it is multiplied in.
PAIRS = [
    (FP32, "fp32"), (FP32, "tf32"), (FP32, "bf16"), (FP32, "fp16"),
    (BF16, "bf16"), (FP16, "fp16"), (BF16, "fp32"), (BF16, "tf32"), (FP16, "tf32"), (FP16, "fp32"),
]  # fmt: skip


def outliers(x):
    """As trained ViTs have them: a channel that is large in every token, another in one."""
    x[:, 7] += 100
    x[3, 11] = -600
    return x


STREAMS = {
    "mean/sigma-0": lambda x: x,
    "mean/sigma-1": lambda x: x + 1,
    "mean/sigma-3": lambda x: x - 3,
    "mean/sigma-10": lambda x: x + 10,
    "outliers": outliers,
    "outliers-mean/sigma-3": lambda x: outliers(x + 3),
    "small": lambda x: x * 1e-4,
}


class Case:
    """A stream of rows, a LayerNorm and a Linear as a model holds them."""

    def __init__(self, dtype, change):
        g = torch.Generator().manual_seed(0)
        self.x = change(torch.randn(M, K, generator=g)).to(dtype)
        self.norm = 1 + 0.3 * torch.randn(K, generator=g), 0.1 * torch.randn(K, generator=g)
        self.weight = (torch.randn(N, K, generator=g) * K**-0.5).to(dtype)
        self.bias = 0.1 * torch.randn(N, generator=g)
        self.norm = tuple(t.to(dtype) for t in self.norm)

    def reference(self, dtype):
        """In float64, or as autocast computes it with matrices in `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else FP32
        x, weight, bias = self.x.to(wide), self.weight, self.bias.to(wide)
        h = F.layer_norm(x, (K,), *(t.to(wide) for t in self.norm), EPS)
        return F.linear(h.to(dtype).to(wide), weight.to(dtype).to(wide), bias)

    def folded(self, precision, arch="sm_80"):
        """The engine's two launches: one writes the rows and their moments, one reads them."""
        dtype = PRECISIONS[precision].dtype
        executor = PtxExecutor() if arch == "ptx" else Interpreter(arch)
        executor.tf32 = precision == "tf32"
        zeros = torch.zeros(M, 16, dtype=dtype), torch.zeros(K, 16, dtype=dtype)
        with executing(executor):
            parts = torch.empty(launch.cdiv(K, moments.WIDTH), M, 2)
            x, y = torch.empty_like(self.x), torch.empty(M, N)
            linear_residual.residual_linear(*zeros, None, self.x, None, x, parts)
            assert torch.equal(x, self.x)
            folded = norm_linear.fold(
                *self.norm, self.weight, self.bias, PRECISIONS[precision], x.dtype
            )
            norm_linear.folded_linear(x, parts, moments.WIDTH, *folded, y, "none", EPS)
        return y

    def verdict(self, precision, arch="sm_80"):
        with FixedOrder(tf32=precision == "tf32"):
            torchs = self.reference(PRECISIONS[precision].dtype)
        truth, got = self.reference(torch.float64), self.folded(precision, arch)
        return judge(got, torchs, truth, dtype=FP32, gpu=PRECISIONS[precision])


def pair_id(pair):
    return f"{str(pair[0])[6:]}-{pair[1]}"


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_keeps_the_contract_of_every_pair_of_dtypes(pair, stream):
    verdict = Case(pair[0], STREAMS[stream]).verdict(pair[1])
    assert verdict.passed, verdict.problem


@pytest.mark.parametrize("arch", ("sm_90", "gfx942", "ptx"))
@pytest.mark.parametrize("precision", ("tf32", "bf16", "fp16"))
def test_keeps_it_on_other_architectures_and_as_compiled(precision, arch):
    verdict = Case(FP32, STREAMS["mean/sigma-10"]).verdict(precision, arch)
    assert verdict.passed, verdict.problem


def test_an_fp32_stream_beyond_fp16_is_no_nan():
    """Autocast to fp16 with |x| > 65504 somewhere: normalised first, as autocast does it."""
    case = Case(FP32, lambda x: x * 6e4)
    assert case.x.abs().max() > torch.finfo(FP16).max
    verdict = case.verdict("fp16")
    assert verdict.passed, verdict.problem
