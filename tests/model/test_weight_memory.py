"""How often weights are held: once per precision in use, once in all when they were released."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from tests.model.tiny_models import OPTIONS, picture, tiny
from vitkern import _C, accelerate, cpu, packing
from vitkern.contract import Error
from vitkern.engines.base import TURNS

ROUNDS = _C.engine_layout("", _C.Precision.bf16) != _C.engine_layout("", _C.Precision.fp32)
rounds = pytest.mark.skipif(not ROUNDS, reason="bf16 computes as fp32 on this CPU")


def ready(**changes):
    model = tiny(**changes).eval()
    return model, picture(model)


def run(model, image):
    with torch.inference_mode():
        return model(image)


# ---- one copy per precision in use ----


@rounds
def test_a_precision_that_is_not_used_any_more_is_dropped():
    model, image = ready()
    run(model, image)
    fp32 = model.weight_bytes()["packed"]
    model.precision = "bf16"
    for _ in range(TURNS):
        run(model, image)
        both = model.weight_bytes()["packed"]
    assert both > fp32, "someone who alternates does not pack each time"
    run(model, image)
    (left,) = model.engines.packed()
    assert left.precision == "bf16" and model.weight_bytes()["packed"] == both - fp32


@rounds
def test_who_alternates_packs_once():
    model, image = ready()
    first = {}
    for turn in range(3 * TURNS):
        model.precision = ("fp32", "bf16")[turn // 3 % 2]
        run(model, image)
        engine = model.engines.ready(model.precision)
        assert first.setdefault(model.precision, engine) is engine


def test_precisions_of_one_layout_share_their_panels():
    model, image = ready()
    run(model, image)
    once = model.weight_bytes()["packed"]
    model.precision = "tf32"
    run(model, image)
    alike = _C.engine_layout("", _C.Precision.fp32) == _C.engine_layout("", _C.Precision.tf32)
    assert (model.weight_bytes()["packed"] == once) is alike


def test_the_engine_and_lone_operators_share_their_panels():
    model, image = ready()
    run(model, image)
    packing.forget()
    model.repack()
    run(model, image)
    model.path = "fused"
    for _ in range(packing.CALLS + 1):
        run(model, image)
    assert packing.held_bytes() == 0, "the engine's panels serve the operators"


def test_packed_weights_die_with_their_model():
    model, image = ready()
    run(model, image)
    panels = weakref.ref(next(iter(model.engines.ready("fp32").matrices.values())))
    del model
    gc.collect()
    assert panels() is None


# ---- the only copy ----


@pytest.mark.parametrize(
    "name",
    "plain no-head pool-none head-tanh head-token-norm position-relative qk-norm no-blocks".split(),
)
def test_released_weights_give_the_same_bits(name):
    model, image = ready(**OPTIONS[name])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = run(model, image)
    memory = [weakref.ref(p) for n, p in model.named_parameters() if n.endswith("fc1.weight")]
    model.release_weights()
    assert torch.equal(run(model, image), before)
    assert all(p() is None for p in memory)
    assert "weights: released" in model.explain()
    unpacked = model.state_dict()
    assert unpacked.keys() == state.keys()
    assert all(torch.equal(unpacked[name], value) for name, value in state.items())
    model.restore_weights()
    assert model.released is None and "released" not in model.explain()
    assert torch.equal(run(model, image), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_releasing_leaves_one_copy():
    model, image = ready()
    run(model, image)
    two = model.weight_bytes()
    model.release_weights()
    run(model, image)
    one = model.weight_bytes()
    assert one["packed"] == two["packed"]
    vectors = sum(p.nbytes for n, p in model.named_parameters() if p.ndim == 1 or "_" in n[:4])
    assert one["parameters"] < two["parameters"] / 4 and one["parameters"] <= vectors
    with torch.no_grad():
        model.norm.weight.mul_(2)  # a vector: packed anew beside the same panels
    assert not torch.equal(run(model, image), run(ready()[0], image))
    assert model.weight_bytes()["packed"] == two["packed"]


@rounds
def test_what_was_rounded_is_not_given_out_as_the_weights():
    model, image = ready()
    state = copy.deepcopy(model.state_dict())
    model.precision = "bf16"
    before = run(model, image)
    model.release_weights()
    assert torch.equal(run(model, image), before)
    for call in (model.state_dict, model.restore_weights):
        with pytest.raises(RuntimeError, match=r"rounded them.*restore_weights\(state_dict\)"):
            call()
    short = {name: value for name, value in state.items() if name != "head.weight"}
    with pytest.raises(ValueError, match=r"head\.weight is missing"):
        model.restore_weights(short)
    assert torch.equal(run(model, image), before), "a refused call changed nothing"
    model.restore_weights(state)
    assert torch.equal(run(model, image), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@rounds
def test_what_packing_left_comes_back_when_it_is_asked_for():
    model, image = ready()
    state = copy.deepcopy(model.state_dict())
    model.precision = "bf16"
    before = run(model, image)
    model.release_weights()
    with pytest.raises(ValueError, match=r"a state dict or rounded=True, not both"):
        model.restore_weights(state, rounded=True)
    model.restore_weights(rounded=True)
    left = model.state_dict()
    assert left.keys() == state.keys()
    miss = [Error.of(left[name], value).rms for name, value in state.items() if value.ndim == 2]
    assert 0 < max(miss) < 2**-8
    assert Error.of(run(model, image), before).rms < 2**-8
    model.train()(image).sum().backward()


@rounds
def test_another_precision_needs_the_weights():
    model, image = ready()
    model.release_weights()
    model.precision = "bf16"
    with pytest.raises(RuntimeError, match=r"packed for fp32.*restore_weights"):
        run(model, image)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model.precision = None
        with pytest.raises(RuntimeError, match="restore_weights"):
            model(image)
    run(model, image)


REFUSED = {
    "train": lambda m, x: m.train(),
    "a forward with gradients": lambda m, x: m(x),
    "the fused path": lambda m, x: m.fused_forward(x),
    "the reference path": lambda m, x: m.reference_forward(x),
    "blocks": lambda m, x: m.forward_intermediates(x),
    "to": lambda m, x: m.to("cpu"),
    "half": lambda m, x: m.half(),
    "load_state_dict": lambda m, x: m.load_state_dict(tiny().state_dict()),
    "load into a module around it": lambda m, x: nn.Sequential(m).load_state_dict(
        nn.Sequential(tiny()).state_dict()
    ),
    "pickle": lambda m, x: pickle.dumps(m),
    "torch.save": lambda m, x: torch.save(m, io.BytesIO()),
    "another patch size": lambda m, x: m.set_input_size((24, 16), 8),
    "accelerate": lambda m, x: accelerate(m),
}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_needs_the_weights_says_what_to_do(call, precision):
    model, image = ready()
    model.precision = precision
    before = run(model, image)
    model.release_weights()
    with pytest.raises(RuntimeError, match="restore_weights"):
        call(model, image)
    assert torch.equal(run(model, image), before), "a refused call changed nothing"


def test_a_copy_by_pickle_says_how_to_keep_the_packed_weights():
    model, _ = ready()
    model.release_weights()
    with pytest.raises(RuntimeError, match=r"model\.save_packed"):
        pickle.dumps(model)


def test_a_hook_needs_the_weights():
    model, image = ready()
    model.release_weights()
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"has a hook.*restore_weights"):
        run(model, image)
    handle.remove()
    run(model, image)


def test_copies_share_the_panels():
    model, image = ready()
    before = run(model, image)
    model.release_weights()
    deep, shallow = copy.deepcopy(model), copy.copy(model)
    assert torch.equal(run(deep, image), before) and torch.equal(run(shallow, image), before)
    panels = {p.panels for m in (model, deep) for p in m.released.panels.values()}
    assert len(panels) == len(model.released.panels)
    deep.restore_weights()
    assert model.released is not None and torch.equal(run(model, image), before)
    deep.train()(image).sum().backward()


def test_a_state_dict_of_a_module_around_it_is_unpacked():
    model, _ = ready()
    want = nn.ModuleDict({"vit": copy.deepcopy(model)}).state_dict()
    model.release_weights()
    got = nn.ModuleDict({"vit": model}).state_dict()
    assert want.keys() == got.keys() and all(torch.equal(got[n], want[n]) for n in want)


def test_a_new_head_and_another_image_size_need_no_weights():
    model, _ = ready()
    want = copy.deepcopy(model)
    model.release_weights()
    for one in (model, want):
        one.set_input_size((32, 16))
    larger = picture(want)
    assert torch.equal(run(model, larger), run(want, larger))
    for one in (model, want):
        one.reset_classifier(5)
        nn.init.constant_(one.head.bias, 2.0)
    assert torch.equal(run(model, larger), run(want, larger))
    model.restore_weights()
    assert torch.equal(run(model, larger), run(want, larger))


def test_tied_weights_are_held_once():
    model, image = ready()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    before = run(model, image)
    model.release_weights()
    assert model.blocks[1].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight
    assert torch.equal(run(model, image), before)
    model.restore_weights()
    assert model.blocks[1].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight


def test_release_refuses_what_the_engine_cannot_serve():
    model, _ = ready()
    with pytest.raises(RuntimeError, match=r"training mode; call model\.eval"):
        model.train().release_weights()
    model.eval().blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="has a hook"):
        model.release_weights()
    with pytest.raises(RuntimeError, match=r"release_weights: .*not fp64"):
        ready()[0].double().release_weights()
    assert model.released is None and model.blocks[0].mlp.fc1.weight.is_cpu


def test_accelerate_without_keeping_weights():
    model, image = ready()
    before = run(model, image)
    memory = weakref.ref(model.blocks[0].mlp.fc1.weight)
    fast = accelerate(model, keep_weights=False)
    assert memory() is None, "the model that was given is left without them"
    assert torch.equal(run(fast, image), before)
    assert torch.equal(run(model, image), before), "a ViT computes with the same panels"
    fast.restore_weights()
    assert model.released is not None and fast.released is None
    assert torch.equal(run(model, image), before) and torch.equal(run(fast, image), before)


def test_matrices_of_bf16_models_are_released_too():
    model, image = ready()
    model = model.bfloat16()
    before = run(model, image.bfloat16())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.release_weights()
    assert torch.equal(run(model, image.bfloat16()), before)
    if model.released.exact:
        assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    else:
        model.restore_weights(state)
        assert torch.equal(run(model, image.bfloat16()), before)


def test_every_instruction_set_of_this_cpu_has_one_layout_for_fp32_operators_and_engine():
    for isa in cpu.isas():
        operators = _C.operator_layout(isa, _C.DType.f32)
        assert operators == _C.engine_layout(isa, _C.Precision.fp32), isa
