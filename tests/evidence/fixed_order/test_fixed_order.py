"""The yardstick: PyTorch's error, but the same bits on every CPU."""

import math

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


def halves(x):
    """The last axis summed by halves in fp32."""
    while x.shape[-1] > 1:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], x.shape[-1] % 2), np.float32)], -1)
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x


def plain(function, x):
    """A function of the C library in fp64, rounded."""
    return np.vectorize(function, otypes=[np.float64])(x.astype(np.float64)).astype(np.float32)


def softmax_parts(x):
    """e^(x - top), its sum, and top, along the last axis."""
    top = x.max(-1, keepdims=True)
    e = plain(math.exp, x - top)
    return e, halves(e), top


def small_network_by_numpy(x, weight, bias):
    """small_network, one IEEE operation after another."""
    h = fixed_order.matmul(x.reshape(-1, x.shape[-1]), weight.T) + bias
    D = np.float32(len(bias))
    centred = h - halves(h) / D
    rstd = np.float32(1) / np.sqrt(halves(centred * centred) / D + np.float32(1e-5))
    y = centred * rstd * bias + bias
    cdf = np.float32(0.5) * (1 + plain(math.erf, y * np.float32(math.sqrt(0.5))))
    q = (y * cdf).reshape(*x.shape[:2], 2, -1).transpose(0, 2, 1, 3)  # (B, heads, S, 16)
    half = q * np.float32(0.5)  # the root of 1 / sqrt(16)
    e, total, _ = softmax_parts(fixed_order.matmul(half, half.swapaxes(-1, -2)))
    y = plain(math.tanh, halves(fixed_order.matmul(e / total, q))[..., 0])
    _, total, top = softmax_parts(y)
    return (plain(math.log, total) + top)[..., 0]


def test_all_cpus_get_the_same_bits():
    """Those of plain IEEE arithmetic; twice, as nothing but the inputs may show."""
    x, weight, bias = normal(2, 9, 50), normal(32, 50, seed=1) / 7, normal(32, seed=2)
    weight.requires_grad_()
    found = []
    for _ in range(2):
        with FixedOrder():
            y = small_network(x, weight, bias)
            found.append((y, *torch.autograd.grad(y.sum(), weight)))
    expected = small_network_by_numpy(x.numpy(), weight.detach().numpy(), bias.numpy())
    assert np.array_equal(found[0][0].detach().numpy(), expected)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    wide = [t.detach().double() for t in (x, weight, bias)]
    wide[1].requires_grad_()
    (truth,) = torch.autograd.grad(small_network(*wide).sum(), wide[1])
    host = Error.of(torch.autograd.grad(small_network(x, weight, bias).sum(), weight)[0], truth)
    assert Error.of(found[0][1], truth).rms < 1.7 * host.rms


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
