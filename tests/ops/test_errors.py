"""Bad arguments to an operator: an error that names operator, tensor and sizes, never a crash."""

import functools

import pytest
import torch

from vitkern import ops
from vitkern.registry import REGISTRY

SEED = torch.tensor([7])


def t(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.layernorm(t(3, 5), t(4), t(5)), r"layernorm: weight has shape \(4,\).*D=5"),
        (lambda: ops.layernorm(t(3, 5), t(5, 1)), r"layernorm: weight .* expected \(D\)"),
        (lambda: ops.norm_linear(t(2, 5), t(5), t(5), t(3, 4)), r"norm_linear: weight .*K=5"),
        (lambda: ops.norm_linear(t(2, 5), t(5), t(5), t(3, 5), t(4)), r"norm_linear: bias .*N=3"),
        (
            lambda: ops.norm_linear(t(2, 5), t(5), t(5), t(3, 5), activation="relu"),
            r"activation 'relu' is unknown: use one of none, gelu",
        ),
        (lambda: ops.attention(t(1, 4, 2, 1, 8)), r"attention: qkv .* expected \(B, S, 3, H, E\)"),
        (lambda: ops.attention(t()), r"attention: qkv has shape \(\), expected"),
        (lambda: ops.attention(t(1, 4, 3, 8)), r"attention: qkv has shape \(1, 4, 3, 8\)"),
        (lambda: ops.attention(t(2, 4, 3, 1, 8), t(3, 1, 4, 4)), r"attention: bias .*B=2"),
        (lambda: ops.attention(t(1, 4, 3, 1, 8), dropout_p=0.1), r"dropout_p=0.1 needs seed"),
        (
            lambda: ops.attention(t(1, 4, 3, 1, 8), dropout_p=1.5, seed=SEED),
            r"dropout_p=1.5 is not a probability",
        ),
        (
            lambda: ops.attention(t(1, 4, 3, 1, 8), dropout_p=0.5, seed=t(1)),
            r"needs seed, an int64 tensor",
        ),
        (
            lambda: ops.attention(t(2, 4, 3, 1, 8), offsets=torch.tensor([0, 4]).int()),
            r"all sequences in one row",
        ),
        (
            lambda: ops.attention(t(1, 4, 3, 1, 8), offsets=torch.tensor([0, 9]).int()),
            r"offsets must ascend from 0 to S=4",
        ),
        (
            lambda: ops.attention(t(1, 4, 3, 1, 8), offsets=torch.tensor([0, 3, 1, 4]).int()),
            r"offsets must ascend",
        ),
        (
            lambda: ops.attention(t(1, 4, 3, 1, 8), offsets=torch.tensor([0.0, 4.0])),
            r"offsets must be int32",
        ),
        (
            lambda: ops.linear_residual(t(2, 3, 4), t(5, 4), None, t(2, 3, 6)),
            r"linear_residual: residual .*N=5 \(from weight\)",
        ),
        (lambda: ops.linear_residual(t(6, 4), t(5, 4), None, t(6, 5)), r"linear_residual: x has"),
        (
            lambda: ops.mlp(t(1, 2, 4), t(4), t(4), t(8, 4), None, t(4, 9), None),
            r"mlp: fc2_weight .*F=8 \(from fc1_weight\)",
        ),
        (
            lambda: ops.patch_embed(t(1, 3, 30, 32), t(8, 3, 16, 16)),
            r"30x32 pixels does not divide",
        ),
        (lambda: ops.patch_embed(t(1, 4, 32, 32), t(8, 3, 16, 16)), r"patch_embed: weight .*C=4"),
        (
            lambda: ops.patch_embed(t(1, 3, 32, 32), t(8, 3, 16, 16), position=t(5, 8)),
            r"position has N=5, but the other arguments make N=4",
        ),
        (
            lambda: ops.patch_embed(t(1, 3, 32, 32), t(8, 3, 16, 16), mean=t(3)),
            r"mean and std go together",
        ),
    ],
)
def test_says_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", (torch.uint8, torch.int64, torch.bool, torch.complex64), ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda bad: ops.layernorm(bad(4, 8)),
        lambda bad: ops.norm_linear(t(2, 5), t(5), t(5), bad(3, 5)),
        lambda bad: ops.attention(bad(1, 4, 3, 1, 8)),
        lambda bad: ops.attention(t(1, 4, 3, 1, 8), bad(1, 1, 4, 4)),
        lambda bad: ops.linear_residual(t(2, 3, 4), t(5, 4), None, bad(2, 3, 5)),
        lambda bad: ops.mlp(bad(1, 2, 4), t(4), t(4), t(8, 4), None, t(4, 8), None),
        lambda bad: ops.patch_embed(t(1, 3, 32, 32), bad(8, 3, 16, 16)),
    ],
)
def test_tensors_that_are_not_floats_are_refused(call, kind):
    with pytest.raises(TypeError, match="expected a floating-point tensor"):
        call(lambda *shape: torch.zeros(shape, dtype=kind))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "op", {s.op.name: s for s in REGISTRY.values()}.values(), ids=lambda s: s.op.name
)
def test_tensors_that_may_not_be_none_are_refused(op, dtype):
    """By every kernel and the reference alike: torch itself takes None for any tensor."""
    inputs = op.make_inputs(op.cases[2], dtype)
    for name in op.op.required:
        args = op.arguments({**inputs, name: None})
        with pytest.raises(TypeError, match=f"{op.op.name}: {name} must be a torch.Tensor, got No"):
            op.torch_op()(*args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_have_weights(dtype):
    kind = functools.partial(t, dtype=dtype)
    for missing in ("norm_weight", "norm_bias"):
        norm = {"norm_weight": kind(4), "norm_bias": kind(4), missing: None}
        with pytest.raises(TypeError, match=f"norm_linear: {missing} must be a torch.Tensor"):
            ops.norm_linear(kind(2, 4), **norm, weight=kind(8, 4))
        with pytest.raises(TypeError, match=f"mlp: {missing} must be a torch.Tensor"):
            fc = {"fc1_weight": kind(8, 4), "fc1_bias": None, "fc2_weight": kind(4, 8)}
            ops.mlp(kind(1, 2, 4), **norm, **fc, fc2_bias=None)


@pytest.mark.parametrize("bad", [None, [1.0], "x", 3], ids=str)
def test_what_is_no_tensor_is_refused(bad):
    with pytest.raises((TypeError, RuntimeError), match=r"Tensor"):
        ops.layernorm(bad)
    with pytest.raises((TypeError, RuntimeError), match=r"Tensor"):
        ops.layernorm(bad, t(8).requires_grad_())  # with a backward to follow
    with pytest.raises(TypeError, match=r"attention: qkv must be a torch.Tensor"):
        ops.attention(bad)
    with pytest.raises(TypeError, match=r"patch_embed: image must be a torch.Tensor"):
        ops.patch_embed(bad, t(8, 3, 16, 16))
    if bad is not None:
        with pytest.raises(TypeError, match=r"attention: offsets must be a torch.Tensor"):
            ops.attention(t(1, 4, 3, 1, 8), offsets=bad)
        with pytest.raises(ValueError, match=r"dropout_p=0.5 needs seed"):
            ops.attention(t(1, 4, 3, 1, 8), dropout_p=0.5, seed=bad)


def test_float64_does_not_mix():
    with pytest.raises(TypeError, match="float64 does not mix"):
        ops.norm_linear(t(2, 5), t(5), t(5), t(3, 5, dtype=torch.float64))


def test_any_seed_will_do():
    qkv = torch.randn(1, 9, 3, 2, 8)
    for seed in (-5, 2**63 - 1, -(2**63)):
        tensor = torch.tensor([seed])
        ours = ops.attention(qkv, dropout_p=0.3, seed=tensor)
        truth = ops.attention(qkv.double(), dropout_p=0.3, seed=tensor)
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


def test_derivatives_of_higher_order_and_of_other_kinds():
    """By the definition, where an opaque operator would be wrong."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    w, b = torch.rand(8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: ops.layernorm(x, w, b), [x])
    x32, v = torch.randn(3, 8), torch.randn(3, 8)
    _, ours = torch.func.jvp(ops.layernorm, (x32,), (v,))
    plain = functools.partial(torch.nn.functional.layer_norm, normalized_shape=(8,), eps=1e-6)
    _, torchs = torch.func.jvp(plain, (x32,), (v,))
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    gradient = torch.func.grad(lambda x: ops.layernorm(x).square().sum())(x32)
    assert gradient.shape == x32.shape


def test_a_result_may_be_changed_in_place():
    x = torch.randn(3, 8, requires_grad=True)
    y = ops.layernorm(x)
    y += 1
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_integer_images_other_than_uint8_are_refused():
    with pytest.raises(TypeError, match="floating point or uint8"):
        ops.patch_embed(t(1, 3, 32, 32, dtype=torch.int32), t(8, 3, 16, 16))


def test_tensors_on_two_devices_are_refused():
    with pytest.raises((ValueError, RuntimeError), match=r"meta|device"):
        ops.layernorm(t(2, 4), torch.ones(4, device="meta"))


@pytest.mark.parametrize("spec", REGISTRY.values(), ids=lambda spec: spec.name)
def test_lazy_tensors_are_read(spec):
    """A lazy minus sign and lazy zeros are not in the memory that kernels read."""
    inputs = spec.make_inputs(spec.cases[3], torch.float32)
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            zeros = torch._efficientzerotensor(tensor.shape)
            for lazy in (torch._neg_view(tensor), zeros):
                got, want = (
                    spec.torch_op()(*spec.arguments({**inputs, name: given}))
                    for given in (lazy, lazy.clone())
                )
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_half_precision_runs_the_reference_on_the_cpu():
    """No native kernel for fp16: the reference computes it, to the bit."""
    x, w = torch.randn(5, 8).half(), torch.randn(8).half()
    torch.testing.assert_close(
        ops.layernorm(x, w, eps=1e-5),
        torch.nn.functional.layer_norm(x, (8,), w, eps=1e-5),
        rtol=0,
        atol=0,
    )


def test_operators_compile():
    function = torch.compile(
        lambda x, w, b: ops.norm_linear(x, w, b, torch.eye(8), activation="gelu"),
        backend="aot_eager",
    )
    x, w, b = torch.randn(5, 8, requires_grad=True), torch.randn(8), torch.randn(8)
    y = function(x, w, b)
    torch.testing.assert_close(y, ops.norm_linear(x, w, b, torch.eye(8), activation="gelu"))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.shape == x.shape and gradient.isfinite().all()
