"""Attention with offsets: sequences do not see each other, whatever one of them holds."""

import pytest
import torch

from tests.ops.test_ops import multiplies_integers
from vitkern import cpu, ops
from vitkern.registry import REGISTRY

SPEC = REGISTRY["attention+offsets"]
ENDS = [0, 7, 7, 30, 67]  # the second is empty
BAD = (float("nan"), float("inf"), float("-inf"))
ISAS = cpu.operator_isas()


def inputs(dtype, p=0.0):
    """qkv (1, 67, 3, 2, 20), and the operator's arguments."""
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, ENDS[-1], 3, 2, 20, generator=g).to(dtype)
    seed = torch.tensor([11]) if p else None
    return qkv, [qkv, None, 0.3, p, seed, torch.tensor(ENDS, dtype=torch.int32), True]


def poisoned(qkv, bad, part):
    """With one bad number in the third sequence: a query's, a key's or a value's."""
    qkv = qkv.clone()
    qkv[0, 12, part, 1, 3] = bad
    return qkv


def others(t):
    """t (1, S, ...) without the third sequence."""
    return torch.cat([t[:, :7], t[:, 30:]], 1)


@pytest.mark.parametrize("part", (0, 1, 2), ids=("query", "key", "value"))
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("p", (0.0, 0.4), ids=("plain", "dropout"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_reference_and_its_backward_keep_sequences_apart(dtype, p, bad, part):
    clean, args = inputs(dtype, p)
    grad = torch.randn(1, ENDS[-1], 2, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for qkv in (clean, poisoned(clean, bad, part)):
        y, lse = SPEC.op.reference(qkv, *args[1:])
        (dqkv,) = SPEC.op.backward(grad, (qkv, *args[1:]), [lse], frozenset({"qkv"}))
        qkv = qkv.clone().requires_grad_()
        (torchs,) = torch.autograd.grad(SPEC.op.reference(qkv, *args[1:])[0], qkv, grad)
        found.append((y, lse.mT, dqkv, torchs))
    for name, good, got in zip(("y", "lse", "dqkv", "autograd"), *found, strict=True):
        assert torch.equal(others(got), others(good)), name
    assert not found[1][2].isfinite().all(), "the sequence itself shows it"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_native_kernels_agree_with_the_reference(dtype, bad, isa):
    clean, args = inputs(dtype)
    for part in range(3):
        args[0] = poisoned(clean, bad, part)
        shape = SPEC.op.call_shape(dict(zip(SPEC.op.arguments, args, strict=True)))
        results = shape.allocate(args[0])
        cpu.attention(shape.sizes, results, *args, isa=isa)
        truths = SPEC.op.reference(args[0].double(), *args[1:])
        for got, truth in zip(results, truths, strict=True):
            finite = truth.isfinite()
            if multiplies_integers(isa, dtype):  # NaN in all rows of the poisoned head
                assert not got[~finite].isfinite().any()
                assert torch.equal(others(got.isfinite()), others(finite)) or got.ndim == 3
                finite &= got.isfinite()
            else:
                assert torch.equal(got.isnan(), truth.isnan())
                assert torch.equal(got.isinf(), truth.isinf())
            room = 2e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(
                got[finite].double(), truth[finite].double(), rtol=room, atol=room
            )


def test_gpu_kernels_keep_sequences_apart():
    pytest.importorskip("triton")
    from tests.gpu import contract

    found = []
    clean, args = inputs(torch.float32)
    for qkv in (clean, *(poisoned(clean, bad, 2) for bad in BAD)):
        given = {"qkv": qkv, "offsets": args[5]}
        with contract.gpu("fp32"):
            y, lse = contract.run(SPEC, given)
            (dqkv,) = contract.run_backward(SPEC, given, ["qkv"])
        found.append((others(y), others(lse.mT), others(dqkv)))
    for wrong in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(wrong, found[0], strict=True))


def test_gradients_of_every_order_match_numbers():
    qkv, _ = inputs(torch.float64)
    qkv = qkv[:, :9, :, :1, :3].clone().requires_grad_()
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)

    def attend(qkv):
        return ops.attention(qkv, offsets=offsets)

    assert torch.autograd.gradcheck(attend, [qkv])
    assert torch.autograd.gradgradcheck(attend, [qkv])
    alone = torch.cat([ops.attention(qkv[:, :4]), ops.attention(qkv[:, 4:])], 1)
    torch.testing.assert_close(attend(qkv), alone)


@pytest.mark.parametrize("ends", ([], [0], [0, 9, 5], [1, 9], [0, 8], [-1, 9], [0, 10], [5, 4, 9]))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_the_operator_itself_checks_its_offsets(dtype, ends):
    qkv = torch.randn(1, 9, 3, 1, 4, dtype=dtype)
    offsets = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets must"):
        torch.ops.vitkern.attention(qkv, None, 1.0, 0.0, None, offsets, False)
