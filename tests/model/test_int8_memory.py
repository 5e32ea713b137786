"""int8 without its floats: the integers give the same bits, and what needs floats says so."""

import copy
import weakref

import pytest
import torch
from torch import nn

from tests.model.tiny_models import OPTIONS, picture, tiny
from vitkern import accelerate, cpu, int8
from vitkern.contract import Error
from vitkern.engines.cpu import CpuEngine


def run(model, image):
    with torch.inference_mode():
        return model(image)


def ready_for_int8(option="plain", **changes):
    model = tiny(**{**OPTIONS[option], **changes}).eval()
    model.precision = "int8"
    return model, picture(model)


@pytest.mark.parametrize(
    "option",
    "plain no-head pool-none head-token-norm qk-norm no-qkv-bias mlp-norm swiglu odd-sizes"
    " separate-qkv swiglu-split-normed position-rope stem no-blocks".split(),
)
def test_integers_alone_give_the_same_bits(option):
    model, image = ready_for_int8(option)
    before = run(model, image)
    memory = [weakref.ref(p) for n, p in model.named_parameters() if int8.is_matrix(n, p)]
    model.release_weights()
    assert all(p() is None for p in memory)
    assert all(p.is_meta is int8.is_matrix(n, p) for n, p in model.named_parameters())
    assert torch.equal(run(model, image), before)
    with torch.inference_mode():
        assert ("weights: released" in model.explain()) is bool(memory)
    model.engines.drop()
    assert torch.equal(run(model, image), before), "packed anew of the same integers"


@pytest.mark.parametrize("isa", cpu.isas())
def test_integers_alone_serve_every_instruction_set(isa):
    model, image = ready_for_int8(width=96, heads=3, mlp_width=200)
    with torch.inference_mode():
        before = CpuEngine(model, "int8", isa=isa).logits(image)
        model.release_weights()
        assert torch.equal(CpuEngine(model, "int8", isa=isa).logits(image), before)


@pytest.mark.parametrize("option", ["plain", "separate-qkv", "odd-sizes"])
def test_integers_are_a_quarter_of_the_weights(option):
    model, image = ready_for_int8(option)
    run(model, image)
    kept = model.weight_bytes()
    matrices = {n: p.shape for n, p in model.named_parameters() if int8.is_matrix(n, p)}
    floats = sum(p.nbytes for n, p in model.named_parameters() if n not in matrices)
    integers = sum(N * K + 4 * N for N, K in matrices.values())
    model.release_weights()
    run(model, image)
    alone = model.weight_bytes()
    assert alone == {"parameters": floats + integers, "packed": kept["packed"]}
    copied = copy.deepcopy(model)
    places = {one.weight.integers.data_ptr() for one in copied.released.integers.values()}
    assert places == {one.weight.integers.data_ptr() for one in model.released.integers.values()}


def test_norms_may_change_beside_the_integers():
    model, image = ready_for_int8("separate-qkv")
    before = run(model, image)
    want = copy.deepcopy(model)
    model.release_weights()
    for one in (model, want):
        with torch.no_grad():
            one.blocks[1].norm2.weight.mul_(4)  # a power of two: the smoothing stays the same
            one.blocks[1].norm2.bias.mul_(4)
    assert torch.equal(run(model, image), run(want, image))
    assert not torch.equal(run(model, image), before)


def test_integers_are_not_given_out_as_the_weights():
    model, image = ready_for_int8()
    state = copy.deepcopy(model.state_dict())
    before = run(model, image)
    model.release_weights()
    around = nn.ModuleDict({"vit": model})
    for call in (model.state_dict, model.restore_weights, around.state_dict):
        with pytest.raises(RuntimeError, match=r"for int8, which rounded.*rounded=True.*save_pack"):
            call()
    assert torch.equal(run(model, image), before), "a refused call changed nothing"
    model.restore_weights(state)
    assert model.released is None and torch.equal(run(model, image), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("option", ["plain", "separate-qkv", "swiglu"])
def test_values_of_integers_come_back_when_they_are_asked_for(option):
    model, image = ready_for_int8(option)
    state = copy.deepcopy(model.state_dict())
    before = run(model, image)
    model.release_weights()
    model.restore_weights(rounded=True)
    left = model.state_dict()
    assert left.keys() == state.keys()
    for name, value in state.items():
        if int8.is_matrix(name, value):
            assert 0 < Error.of(left[name], value).rms < 0.03, name
        else:
            assert torch.equal(left[name], value), name
    assert torch.equal(run(model, image), before), "int8 still computes with the same integers"
    model.precision = "fp32"
    assert 0 < Error.of(run(model, image), before).rms < 0.1
    model.precision = None
    model.train()(image).sum().backward()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight.mul_(2)
    model.eval().precision = "int8"
    assert not torch.equal(run(model, image), before), "of weights as they are now"


def test_other_precisions_need_more_than_integers():
    model, image = ready_for_int8()
    model.release_weights()
    for precision in ("fp32", "bf16", None):
        model.precision = precision
        with pytest.raises(RuntimeError, match=r"packed for int8 alone.*rounded=True"):
            run(model, image)
    model.precision = "int8"
    run(model, image)


def test_copies_share_the_integers():
    model, image = ready_for_int8()
    before = run(model, image)
    model.release_weights()
    deep, shallow = copy.deepcopy(model), copy.copy(model)
    assert torch.equal(run(deep, image), before) and torch.equal(run(shallow, image), before)
    assert len(deep.released.integers) == 4 * model.config.depth
    deep.restore_weights(rounded=True)
    assert model.released is not None and torch.equal(run(model, image), before)
    assert torch.equal(run(copy.deepcopy(deep), image), before)


def test_a_new_head_needs_no_floats_of_the_blocks():
    model, _ = ready_for_int8()
    want = copy.deepcopy(model)
    model.release_weights()
    for one in (model, want):
        one.reset_classifier(5)
        nn.init.constant_(one.head.bias, 2.0)
        one.set_input_size((32, 16))
    larger = picture(want)
    assert torch.equal(run(model, larger), run(want, larger))


def test_accelerate_to_int8_without_keeping_weights():
    model = tiny().eval()
    image = picture(model)
    want = run(accelerate(copy.deepcopy(model), "int8"), image)
    memory = weakref.ref(model.blocks[0].mlp.fc1.weight)
    fast = accelerate(model, "int8", keep_weights=False)
    assert memory() is None and torch.equal(run(fast, image), want)
    with pytest.raises(RuntimeError, match=r"packed for int8 alone"):
        run(model, image)
    model.precision = "int8"
    assert torch.equal(run(model, image), want), "a ViT has the same integers"


def test_integers_of_bf16_models_are_released_too():
    model, image = ready_for_int8()
    model, image = model.bfloat16(), image.bfloat16()
    before = run(model, image)
    model.release_weights()
    assert torch.equal(run(model, image), before)
    model.restore_weights(rounded=True)
    assert model.dtype == torch.bfloat16 and Error.of(run(model, image), before).rms < 0.05


def test_a_matrix_of_two_layers_is_not_released_at_int8():
    model, _ = ready_for_int8()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    with pytest.raises(RuntimeError, match=r"two layers share blocks\.1\.mlp\.fc1\.weight"):
        model.release_weights()
    assert model.released is None and model.blocks[0].mlp.fc1.weight.is_cpu
