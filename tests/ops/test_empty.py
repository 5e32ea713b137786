"""Empty results return at once, forward and backward, however long the other axes are."""

import functools

import pytest
import torch

from vitkern import ops
from vitkern.registry import REGISTRY

LONG = 2**40  # a loop over this many would take days
SEED = torch.tensor([7])
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DROP = {"drop_path_p": 0.5, "dropout_p": 0.5, "seed": SEED}

CALLS = {
    "attention-heads": (lambda e: ops.attention(e(1, 0, 3, LONG, 8)), (1, 0, LONG, 8)),
    "attention-samples": (lambda e: ops.attention(e(LONG, 0, 3, 2, 8)), (LONG, 0, 2, 8)),
    "attention-product": (lambda e: ops.attention(e(2**31, 0, 3, 2**31, 8)), (2**31, 0, 2**31, 8)),
    "attention-tokens": (lambda e: ops.attention(e(0, LONG, 3, 2, 8)), (0, LONG, 2, 8)),
    "attention-no-channels": (lambda e: ops.attention(e(1, LONG, 3, 2, 0)), (1, LONG, 2, 0)),
    "attention-dropout": (
        lambda e: ops.attention(e(0, LONG, 3, 2, 8), dropout_p=0.5, seed=SEED), (0, LONG, 2, 8),
    ),
    "attention-offsets": (
        lambda e: ops.attention(e(1, 0, 3, LONG, 8), offsets=torch.tensor([0, 0, 0]).int()),
        (1, 0, LONG, 8),
    ),
    "layernorm-rows": (lambda e: ops.layernorm(e(LONG, 0)), (LONG, 0)),
    "layernorm-many": (lambda e: ops.layernorm(e(2**20, 2**20, 0)), (2**20, 2**20, 0)),
    "layernorm-columns": (lambda e: ops.layernorm(e(0, LONG)), (0, LONG)),
    "norm_linear-columns": (
        lambda e: ops.norm_linear(e(0, 4), e(4), e(4), e(1, 1).detach().expand(LONG, 4)), (0, LONG),
    ),
    "linear_residual-rows": (
        lambda e: ops.linear_residual(e(LONG, 1, 0), e(0, 0), None, e(LONG, 1, 0)), (LONG, 1, 0),
    ),
    "linear_residual-tokens": (
        lambda e: ops.linear_residual(e(0, LONG, 4), e(5, 4), None, e(0, LONG, 5), **DROP),
        (0, LONG, 5),
    ),
    "linear_residual-samples": (
        lambda e: ops.linear_residual(e(LONG, 0, 4), e(5, 4), None, e(LONG, 0, 5), **DROP),
        (LONG, 0, 5),
    ),
    "mlp-rows": (
        lambda e: ops.mlp(e(LONG, 1, 0), e(0), e(0), e(8, 0), e(8), e(0, 8), None), (LONG, 1, 0),
    ),
    "mlp-hidden": (
        lambda e: ops.mlp(e(1, 1, 0), e(0), e(0), e(LONG, 0), None, e(0, LONG), None), (1, 1, 0),
    ),
    "mlp-samples": (
        lambda e: ops.mlp(e(LONG, 0, 4), e(4), e(4), e(8, 4), None, e(4, 8), None, **DROP),
        (LONG, 0, 4),
    ),
    "patch_embed-patches": (
        lambda e: ops.patch_embed(e(1, 0, 2**30, 2**30), e(0, 0, 1, 1)), (1, 2**60, 0),
    ),
    "patch_embed-samples": (
        lambda e: ops.patch_embed(e(LONG, 3, 0, 16), e(8, 3, 16, 16)), (LONG, 0, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CALLS)
def test_empty_results_and_their_gradients_return_at_once(case, dtype):
    call, shape = CALLS[case]
    with torch.no_grad():
        y = call(functools.partial(torch.empty, dtype=dtype))
    assert (y.shape, y.dtype) == (shape, dtype)
    leaves = []

    def leaf(*size):
        leaves.append(torch.empty(size, dtype=dtype, requires_grad=True))
        return leaves[-1]

    call(leaf).sum().backward()
    for one in leaves:
        assert one.grad is None or (one.grad.shape == one.shape and not one.grad.any())


def test_enormous_results_are_refused():
    """norm_linear of no columns is its bias: 2^40 rows of it are more than any memory."""
    for dtype in DTYPES:
        with pytest.raises(RuntimeError, match="allocate"):
            e = functools.partial(torch.empty, dtype=dtype)
            ops.norm_linear(e(LONG, 0), e(0), e(0), e(3, 0))


@pytest.mark.parametrize("B, D", ((2, 4), (0, 4), (2, 0)))
def test_matrices_of_two_dtypes_are_refused_whatever_there_is_to_compute(B, D):
    x, norm, fc1, fc2 = torch.ones(B, 1, D), torch.ones(D), torch.ones(8, D), torch.ones(D, 8)
    with pytest.raises(TypeError, match=r"fc1_weight is torch.bfloat16, fc2_weight torch.float32"):
        ops.mlp(x, norm, norm, fc1.bfloat16(), None, fc2, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_can_be_counted_are_refused(dtype):
    e = functools.partial(torch.empty, dtype=dtype)
    for call in (
        lambda: ops.layernorm(e(2**61, 4, 0), e(0), e(0)),
        lambda: ops.norm_linear(e(2**61, 4, 0), e(0), e(0), e(0, 0)),
        lambda: ops.mlp(e(2**61, 4, 0), e(0), e(0), e(8, 0), None, e(0, 8), None),
    ):
        with pytest.raises(ValueError, match="9223372036854775808 rows are more than 64 bits"):
            call()


def test_the_definition_of_an_empty_mlp_needs_no_hidden_rows():
    """As torch.func calls it; 2^43 hidden rows fit into no memory."""
    e = functools.partial(torch.empty, dtype=torch.float16)
    given = (e(8, LONG, 0), e(0), e(0), e(16, 0), None, e(0, 16), None)
    y, *saved = REGISTRY["mlp"].op.reference(*given, None, "gelu", 1e-6, 0.0, 0.0, None, False)
    assert (y.shape, y.dtype) == ((8, LONG, 0), torch.float16) and not any(map(len, saved))


EMPTY = [
    (s, axes) for s in REGISTRY.values() for axes in s.cases if 0 in (axes.get("B"), axes.get("M"))
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec, axes", EMPTY, ids=lambda s: getattr(s, "name", ""))
def test_an_empty_batch_has_gradients_of_zero(spec, axes, dtype):
    inputs = spec.make_inputs(axes, dtype)
    names = [n for n in spec.op.differentiable if n in inputs and inputs[n].is_floating_point()]
    for name in names:
        inputs[name].requires_grad_()
    y = spec.torch_op()(*spec.arguments(inputs, save=True))
    y = y if isinstance(y, torch.Tensor) else y[0]
    for name, grad in zip(
        names, torch.autograd.grad(y.sum(), [inputs[n] for n in names]), strict=True
    ):
        assert grad.shape == inputs[name].shape and not grad.any(), name
