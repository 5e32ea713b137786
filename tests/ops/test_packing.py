"""Panels of lone operators: the same results, never stale, never more than the limit."""

import gc
import threading

import pytest
import torch
from torch import nn

from tests.ops.test_ops import multiplies_integers
from tests.threads import run_together
from vitkern import _C, cpu, ops, packing


@pytest.fixture(autouse=True)
def nothing_held():
    before = packing.limit()
    packing.forget()
    yield
    packing.limit(before)
    packing.forget()


def linear(dtype=torch.float32, N=33, K=70):
    torch.manual_seed(0)
    return nn.Linear(K, N, dtype=dtype).requires_grad_(False)


def call(layer, x=None):
    x = torch.ones(2, 5, layer.weight.shape[1]) if x is None else x
    return ops.linear_residual(x, layer.weight, layer.bias, torch.zeros(2, 5, len(layer.weight)))


def packed(layer, calls=packing.CALLS):
    for _ in range(calls):
        y = call(layer)
    return y


def calls_of_each_operator(dtype):
    torch.manual_seed(0)

    def made(*shape):
        return torch.randn(shape).to(dtype)

    x, norm = made(2, 9, 24), (made(24), made(24))
    fc1, fc2, narrow, patches = made(70, 24), made(24, 70), made(19, 24), made(24, 2, 3, 3)
    image, residual = made(2, 2, 9, 6), made(2, 9, 19)
    return {
        "norm_linear": lambda: ops.norm_linear(x, *norm, narrow, None, activation="gelu"),
        "linear_residual": lambda: ops.linear_residual(x, narrow, None, residual),
        "mlp": lambda: ops.mlp(x, *norm, fc1, None, fc2, None),
        "patch_embed": lambda: ops.patch_embed(image, patches, None),
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_panels_give_the_bits_of_unpacked_weights(dtype):
    for name, operator in calls_of_each_operator(dtype).items():
        packing.forget()
        first, second = operator(), operator()
        assert not packing.held_bytes(), f"{name}: packed before the third call"
        third = operator()
        assert packing.held_bytes(), f"{name}: not packed at the third call"
        assert torch.equal(first, second) and torch.equal(first, third), name
        assert torch.equal(first, operator()), name


@pytest.mark.parametrize("isa", _C.operator_isas())
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("shape", ((1, 1), (5, 3), (16, 256), (33, 70), (48, 769)), ids=str)
def test_unpacking_gives_the_bits_that_were_packed(isa, dtype, shape):
    weight = torch.randn(shape).to(dtype)
    weight[0, 0] = float("inf")
    layout = _C.operator_layout(isa, packing.DTYPES[dtype])
    panels = _C.Packed(layout, packing.DTYPES[dtype], weight.data_ptr(), *shape)
    back = torch.empty_like(weight)
    if multiplies_integers(cpu.operator_isa(isa, dtype), dtype):  # which were rounded
        assert not panels.unpack(packing.DTYPES[dtype], back.data_ptr())
        return
    assert panels.unpack(packing.DTYPES[dtype], back.data_ptr())
    assert torch.equal(back, weight) and panels.shape == shape and panels.layout == layout


def test_a_layout_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no layout has the number 99999"):
        _C.Packed(99999, _C.DType.f32, torch.ones(1).data_ptr(), 1, 1)


CHANGES = {
    "in place": lambda w: w.mul_(2),
    "a row in place": lambda w: w[0].zero_(),
    "through data": lambda w: w.data.mul_(2),
    "other data": lambda w: setattr(w, "data", torch.randn_like(w)),
    "a view in place": lambda w: w.view(-1)[5:].neg_(),
    "by an optimizer": lambda w: torch.optim.SGD([w], lr=0.1).step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_packed_again(change):
    layer = linear()
    packed(layer)
    if change == "by an optimizer":
        layer.weight.requires_grad_().grad = torch.ones_like(layer.weight)
    with torch.no_grad():
        CHANGES[change](layer.weight)
        fresh = linear()
        fresh.weight.copy_(layer.weight)
        for _ in range(packing.CALLS + 1):
            assert torch.equal(call(layer), call(fresh)), change


def test_forget_sees_what_nothing_shows():
    layer = linear()
    before = packed(layer)
    layer.weight.data[7, 3] += 1  # misses the four elements that are looked at
    packing.forget(layer.weight)
    assert not torch.equal(call(layer), before)


def test_panels_go_with_their_weight():
    layer, other = linear(), linear()
    packed(layer), packed(other)
    both = packing.held_bytes()
    del layer
    gc.collect()
    assert 0 < packing.held_bytes() < both
    other.weight.mul_(2)
    call(other)
    assert not packing.held_bytes()


def test_the_limit_holds_and_nothing_is_packed_beyond_it():
    layers = [linear() for _ in range(4)]
    packed(layers[0])
    one = packing.held_bytes()
    packing.limit(2 * one + one // 2)
    results = [packed(layer, 5) for layer in layers]
    assert packing.held_bytes() == 2 * one
    assert all(torch.equal(results[0], y) for y in results)
    packing.limit(0)
    assert not packing.held_bytes() and torch.equal(packed(layers[0], 5), results[0])
    assert not packing.held_bytes()
    for bad in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            packing.limit(bad)


def test_training_packs_nothing():
    layer, x, norm = linear().requires_grad_(), torch.ones(2, 5, 70), torch.ones(70)
    for _ in range(6):
        ops.norm_linear(x, norm, norm, layer.weight, layer.bias).sum().backward()
    assert not packing.held_bytes(), "a backward follows"
    for _ in range(4):
        call(layer, x).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not packing.held_bytes(), "each version was used once"


def test_tensors_whose_changes_cannot_be_seen_are_not_packed():
    with torch.inference_mode():
        layer = linear()
        packed(layer, 5)
    assert not packing.held_bytes()
    weight, norm = linear().weight.requires_grad_(), torch.ones(70)
    for _ in range(5):  # a cast weight is another tensor at each call
        ops.norm_linear(torch.ones(2, 70), norm, norm, weight.bfloat16(), None)
    assert not packing.held_bytes()


def test_threads_share_one_copy():
    layer = linear(N=257, K=131)
    want = call(linear(N=257, K=131))
    results: list[torch.Tensor] = []

    def work():
        results.extend(call(layer) for _ in range(20))

    run_together([threading.Thread(target=work) for _ in range(4)])
    assert len(results) == 80 and all(torch.equal(y, want) for y in results)
    assert (
        packing.held_bytes()
        == _C.Packed(
            _C.operator_layout("", _C.DType.f32), _C.DType.f32, layer.weight.data_ptr(), 257, 131
        ).bytes
    )


def test_a_weight_may_be_swapped_for_another():
    """torch.utils.swap_tensors, which `.to` may use, refuses tensors with weak references."""
    weight, x = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(2, 3, 8)
    with torch.no_grad():
        for _ in range(packing.CALLS):
            before = ops.linear_residual(x, weight, None, x)
        torch.utils.swap_tensors(weight, torch.nn.Parameter(weight * 2))
        after = ops.linear_residual(x, weight, None, x)
    assert torch.allclose(after - x, 2 * (before - x), atol=1e-5)
