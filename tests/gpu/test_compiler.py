"""What Triton is asked to compile: the same by a first call and ahead of time, on every GPU."""

import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from tests.evidence.fake_cuda import fake_cuda
from tests.gpu.mocked_driver import pretended
from tests.gpu.version_matrix import launches
from vitkern.gpu import (
    compiler,
    configs,
    gemm,
    linear_residual,
    moments,
    patch_embed,
    triton_version,
)
from vitkern.gpu.launch import Recorder, executing


def residual_linear(arch: str, B: int, K: int, N: int, dtype=torch.bfloat16, device="meta"):
    """The launch of linear_residual on B rows: with K = N = 1 its sizes and strides are 1."""
    x, weight, bias, residual, y = (
        torch.empty(size, dtype=dtype, device=device).normal_()
        for size in ((B, K), (N, K), (N,), (B, N), (B, N))
    )
    with executing(Recorder(configs.nearest_arch(arch))) as recorder:
        linear_residual.residual_linear(x, weight, bias, residual, None, y)
    return recorder.launches[0]


@pytest.fixture
def asked(monkeypatch):
    """What triton.compile is given, none of which is compiled."""
    found = []

    def note(source, target=None, options=None):
        found.append((source, options))
        raise Noted

    monkeypatch.setattr(triton, "compile", note)
    return found


class Noted(Exception):
    """In the place of a compiled kernel."""


def ask_for(arch, *wanted):
    """What a first call of each would do, up to the compiler."""
    with pretended(arch) as executor:
        for one in wanted:
            with pytest.raises(RuntimeError, match="cannot compile") as refused:
                executor.native.prepare([one])
            assert isinstance(refused.value.__cause__, Noted)


def described(source, options):
    attributes = tuple(sorted((path, str(value)) for path, value in source.attrs.items()))
    types = tuple(source.signature.items())
    return source.fn, types, tuple(source.constants.items()), attributes, tuple(options.items())


@pytest.mark.parametrize("arch", ["sm_80", "gfx90a"])
def test_a_first_call_compiles_what_the_build_lists(asked, arch):
    wanted = launches(arch, "Ti/16", ["bf16", "fp32"])
    wanted += [residual_linear(arch, 5, 1, 1), residual_linear(arch, 1, 16, 1)]
    ask_for(arch, *wanted)
    listed = [compiler.input_of(one.variant, compiler.target_of(arch)) for one in wanted]
    assert [described(*one) for one in asked] == [described(*one) for one in listed]
    assert all(options["enable_fp_fusion"] is True for _, options in asked)


def test_an_integer_that_is_1_stays_an_argument(asked):
    ask_for("sm_80", residual_linear("sm_80", 5, 1, 1))
    ((source, _),) = asked
    assert {source.signature[name] for name in ("N", "K", "S", "x_stride")} == {"i32"}


def test_a_seed_promises_nothing():
    """Seeds of blocks are neighbours in one tensor: half of them are not aligned."""
    found = [one for one in launches("sm_80", "Ti/16", ["bf16"])]
    kernels = {one.kernel for one in found}
    seeds = [p for kernel in kernels for p in kernel.params if p.name.endswith("seed")]
    assert len(seeds) > 5 and all(parameter.do_not_specialize for parameter in seeds)


def test_a_first_call_starts_the_kernel_with_all_its_arguments():
    """As the stand-in driver was given them, and executes them."""
    one = residual_linear("sm_80", 40, 32, 48, torch.float32, "cpu")
    with pretended("sm_80") as executor:
        kernel = registered(executor, one.variant)
        for _ in range(2):
            executor.run(one)
        assert "1 compiled now; launches so far: 2" in executor.status()
    assert fake_cuda().executed == [(0, kernel)] * 2
    x, weight, bias, residual, y = (
        one.arguments[name] for name in ("x", "weight", "bias", "residual", "y")
    )
    torch.testing.assert_close(y, residual + torch.nn.functional.linear(x, weight, bias))


def registered(executor, variant) -> str:
    """Compiled and loaded, and its source told to the stand-in driver; the kernel's name."""
    name = executor.native.kernel(variant).name
    entry = executor.native.cache.find(variant)
    fake_cuda().register(entry.code, variant.kernel, entry.arguments, dict(variant.constants))
    return name


# ---- precisions ----


@pytest.mark.parametrize("arch", configs.TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_backend_knows_the_precision_it_is_asked_for(arch, dtype):
    backend = triton.compiler.make_backend(compiler.target_of(arch))
    known = backend.parse_options({}).allowed_dot_input_precisions
    for tf32 in (True, False):
        with executing(Recorder(configs.nearest_arch(arch), tf32)):
            precision = gemm.precision_of(torch.empty(4, 4, dtype=dtype, device="meta"))
        assert precision in known
        assert (precision == "ieee") == (dtype != torch.float32 or arch.startswith("gfx"))


@pytest.mark.parametrize("arch", ["sm_80", "gfx90a"])
def test_a_16_bit_gemm_compiles(arch):
    with pretended(arch) as executor:
        executor.native.prepare([residual_linear(arch, 40, 64, 64)])
        assert "1 compiled now; launches so far: none" in executor.status()


# ---- versions ----


def test_versions_are_compared_by_their_numbers():
    for version in ("3.4.0", "3.10.0", "3.7.1+git1234", "4.0"):
        triton_version.require(version)
    for version in ("3.3.1", "3.2.0+gitb2684bf3", "2.1", "unknown"):
        with pytest.raises(ImportError, match=r"Triton 3.4 or newer \(torch 2.8 .* this is"):
            triton_version.require(version)


OLD_TRITON = """
    import torch, triton
    triton.__version__ = "3.3.1"
    from tests.model.tiny_models import tiny
    from vitkern.engines import base
    import vitkern.ops  # declares the operators

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x, weight, bias = torch.randn(5, 48), torch.rand(48), torch.randn(48)
    layernorm = torch.ops.vitkern.layernorm.default
    y, stats = layernorm.redispatch(keys, x, weight, bias, 1e-6, True)
    assert torch.equal(y, torch.nn.functional.layer_norm(x, (48,), weight, bias, 1e-6))
    backward = torch.ops.vitkern.layernorm_backward.default
    needs = [True, True, True, False, False]
    assert len(backward.redispatch(keys, y, x, weight, bias, 1e-6, True, [stats], needs)) == 3

    model = tiny().eval()
    image = torch.empty(1, 3, 8, 8, device="meta")
    base.engine_class = lambda device, kind=base.engine_class: kind("cuda")
    print(model.engines.why_not(image, "fp32"))
    type(model).device = torch.device("cuda", 0)
    with torch.no_grad():
        print(model.explain())
"""


def test_an_old_triton_runs_the_references_and_says_so():
    command = [sys.executable, "-c", textwrap.dedent(OLD_TRITON)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    reason = "the GPU kernels need Triton 3.4 or newer (torch 2.8 and newer bring one), this is"
    assert f"what the engine needs is not installed ({reason} 3.3.1)" in ran.stdout
    assert f"kernels: PyTorch's: the GPU backend is not available ({reason} 3.3.1)" in ran.stdout


def test_the_build_says_which_triton_it_needs(capsys, monkeypatch, tmp_path):
    from vitkern.__main__ import main

    monkeypatch.setattr(triton, "__version__", "3.3.1")
    assert main(["aot", "--arch", "sm_80", "--out", str(tmp_path)]) == 2
    assert "need Triton 3.4 or newer" in capsys.readouterr().err


HASHES = """
import sys
from vitkern.gpu import compiler, linear_residual, patch_embed
kernels = patch_embed.patch_embed_forward, linear_residual.linear_residual_forward
for kernel in kernels[:: int(sys.argv[1])]:
    kernel.cache_key  # as Triton asks for it when it compiles one
print([compiler.source_of(kernel) for kernel in kernels])
"""


def test_a_kernel_s_hash_does_not_depend_on_which_was_compiled_first():
    """Half of a build's kernels were of "another version" to a process that began with others."""
    orders = [
        subprocess.run([sys.executable, "-c", HASHES, step], capture_output=True, text=True)
        for step in ("1", "-1")
    ]
    assert orders[0].returncode == 0, orders[0].stderr
    assert orders[0].stdout == orders[1].stdout


def test_a_kernel_s_hash_sees_the_constants_of_what_it_calls(monkeypatch):
    kernel = patch_embed.patch_embed_forward
    before = compiler.source_of(kernel)
    monkeypatch.setattr(compiler, "_sources", {})
    assert compiler.source_of(kernel) == before
    monkeypatch.setattr(moments, "_WIDTH", tl.constexpr(16))
    monkeypatch.setattr(compiler, "_sources", {})
    assert compiler.source_of(kernel) != before
