"""The yardstick: PyTorch's error, but the same bits on every CPU."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.evidence import fixed_order
from tests.evidence.fixed_order.torch_mode import FixedOrder
from vitkern.contract import Error


def normal(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).float()


@pytest.mark.parametrize(
    "shape", ((1, 1, 1), (5, 3, 7), (17, 64, 500), (3, 130, 1), (2, 5, 0)), ids=str
)
def test_a_product_adds_in_ascending_order(shape):
    M, N, K = shape
    a, b = normal(M, K).numpy(), normal(K, N, seed=1).numpy()
    total = np.zeros((M, N), np.float32)
    for start in range(0, K, 192):
        part = np.zeros((M, N), np.float32)
        for k in range(start, min(start + 192, K)):
            part += a[:, k : k + 1] * b[k]
        total += part
    assert np.array_equal(fixed_order.matmul(a, b), total)


@pytest.mark.parametrize("step", (1, 4, 8))
def test_accumulation_rounds_once_a_step(step):
    a, b, c = (
        normal(*shape, seed=i).numpy() for i, shape in enumerate([(9, 20), (20, 33), (9, 33)])
    )
    total = c.copy()
    for k in range(0, 20, step):
        part = np.zeros(total.shape)
        for i in range(k, min(k + step, 20)):
            part += a[:, i : i + 1].astype(np.float64) * b[i]
        total = (total + part).astype(np.float32)
    assert np.array_equal(fixed_order.accumulate(a, b, c, step), total)


def test_a_row_does_not_depend_on_its_place():
    a, b = normal(70, 333).numpy(), normal(333, 90, seed=1).numpy()
    whole = fixed_order.matmul(a, b)
    assert np.array_equal(fixed_order.matmul(a[41:42], b), whole[41:42])
    assert np.array_equal(fixed_order.matmul(a, b[:, 7:9]), whole[:, 7:9])


def small_network(x, weight, bias):
    """One of everything that sums or approximates."""
    y = F.gelu(F.layer_norm(F.linear(x, weight, bias), bias.shape, bias, bias), approximate="none")
    q = y.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).sum(-1).tanh().logsumexp(-1)


def test_all_cpus_get_the_same_bits():
    """The digest is part of the test: any CPU that computes another one fails here first."""
    x, weight, bias = normal(2, 9, 50), normal(32, 50, seed=1) / 7, normal(32, seed=2)
    weight.requires_grad_()
    with FixedOrder():
        y = small_network(x, weight, bias)
        (gradient,) = torch.autograd.grad(y.sum(), weight)
    bits = y.detach().numpy().tobytes() + gradient.numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == "55226df8828b84cf"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
def test_has_the_error_of_pytorch(dtype):
    """A yardstick that is too long or too short would be none: 0.6 to 1.7 times this host's own."""
    x, weight, bias = normal(4, 60, 768), normal(96, 768, seed=1) / 28, normal(96, seed=2)
    truth = small_network(x.double(), weight.double(), bias.double())
    given = [t.to(dtype) for t in (x, weight, bias)]
    with FixedOrder():
        fixed = Error.of(small_network(*given), truth)
    host = Error.of(small_network(*given), truth)
    assert 0.6 < fixed.rms / host.rms < 1.7


def test_tf32_rounds_the_operands_of_both_directions():
    x, weight = normal(3, 40), normal(5, 40, seed=1).requires_grad_()

    def rounded(t):  # to the nearest of 10 bits
        return torch.from_numpy((t.numpy().view(np.int32) + 0x1000 & ~0x1FFF).view(np.float32))

    grad = normal(3, 5, seed=2)
    with FixedOrder(tf32=True):
        y = F.linear(x, weight)
        (dweight,) = torch.autograd.grad(y, weight, grad)
    with FixedOrder():
        assert torch.equal(y, rounded(x) @ rounded(weight.detach()).T)
        assert torch.equal(dweight, rounded(grad).T @ rounded(x))


def test_refuses_operators_without_a_fixed_order():
    with FixedOrder(), pytest.raises(NotImplementedError, match="cumsum"):
        torch.ones(3).cumsum(0)
    with FixedOrder():
        assert torch.ones(3, dtype=torch.float64).cumsum(0)[-1] == 3
