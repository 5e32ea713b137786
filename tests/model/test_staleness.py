"""A packed engine is never out of date: whatever changes the weights, the next forward has them."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.model.tiny_models import picture, tiny
from vitkern import _C
from vitkern.engines import base
from vitkern.engines.base import Engine, Places, places
from vitkern.engines.cpu import CpuEngine


def assert_follows(change, **options):
    """A forward after the change is what a fresh copy of the model computes, and is another."""
    model = tiny(**options)
    model.path, image = "engine", picture(model)
    with torch.no_grad():
        before = model(image)
        change(model)
        after, fresh = model(image), copy.deepcopy(model)(image)
    assert torch.equal(after, fresh) and not torch.equal(before, after)


OTHER = {n: p.detach() for n, p in tiny(seed=7).named_parameters()}

DENSE = {  # what people do to weights through .data, all elements of one parameter
    "a scale": lambda w, name: w.data.mul_(0.5),
    "a tiny scale": lambda w, name: w.data.mul_(1 + 2**-20),
    "a shift": lambda w, name: w.data.add_(1e-3),
    "a sign flip": lambda w, name: w.data.neg_(),
    "a step of an average": lambda w, name: w.data.lerp_(OTHER[name], 1e-3),
    "a copy": lambda w, name: w.data.copy_(OTHER[name]),
    "a fill": lambda w, name: w.data.fill_(0.125),
}


@pytest.mark.parametrize("name", ("blocks.1.mlp.fc1.weight", "cls_token", "norm.bias", "head.bias"))
@pytest.mark.parametrize("write", DENSE.values(), ids=DENSE)
def test_sees_a_dense_write_through_data(write, name):
    assert_follows(lambda model: write(model.get_parameter(name), name))


def test_sees_a_scale_of_mostly_zero_weights():
    """Zeros do not show a scale: the elements that are watched are others."""

    def only_one(model):
        with torch.no_grad():
            model.head.weight.zero_()[17, 5] = 0.5
            model.head.bias.zero_()

    def scale(model):
        model.head.weight.data.mul_(2)

    model = tiny()
    only_one(model)
    image = picture(model)
    with torch.no_grad():
        before = model(image)
        scale(model)
        assert torch.equal(model(image), 2 * before)


def test_sees_a_write_through_data_of_weights_in_any_layout():
    def transpose(model):
        for block in model.blocks:  # in memory, not in value
            weight = block.mlp.fc1.weight
            block.mlp.fc1.weight = nn.Parameter(weight.detach().t().contiguous().t())
        model.norm.weight = nn.Parameter(model.norm.weight.detach().repeat_interleave(3)[::3])

    def write(model):
        model.blocks[2].mlp.fc1.weight.data.mul_(1.5)
        model.norm.weight.data.mul_(1.5)

    model = tiny()
    transpose(model)
    image = picture(model)
    with torch.no_grad():
        before, unchanged = model(image), model.engines.ready("fp32")
        model(image)
        assert model.engines.ready("fp32") is unchanged
        write(model)
        after = model(image)
        assert torch.equal(after, copy.deepcopy(model)(image)) and not torch.equal(before, after)


def test_sees_a_parameter_whose_data_is_a_view_of_the_same_memory():
    def transpose(model):
        model.blocks[0].attn.proj.weight.data = model.blocks[0].attn.proj.weight.data.t()

    assert_follows(transpose)
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        before = model(image)
        for parameter in (model.head.weight, model.head.bias):
            parameter.data = parameter.data[:9]
        torch.testing.assert_close(model(image), before[:, :9], rtol=1e-5, atol=1e-5)


def test_sees_a_parameter_whose_data_was_replaced_twice():
    """The allocator may give the second the address of the first."""

    def replace(model):
        for _ in range(2):
            model.head.weight.data = model.head.weight.data * 1.5

    assert_follows(replace)


def test_sees_a_parameter_that_was_not_there():
    model = tiny(class_token=False, registers=1, pool="mean", position="none")
    image = picture(model)
    with torch.no_grad():
        model(image)
        entries = (2 * 6 - 1) * (2 * 4 - 1) + 3
        for block in model.blocks:
            block.attn.relative_position_bias_table = nn.Parameter(torch.randn(entries, 2))
        auto = model(image)
        model.path = "reference"
        torch.testing.assert_close(auto, model(image), rtol=1e-4, atol=1e-4)


def test_repack_sees_what_nothing_else_does():
    """One element through .data is seen only if it is one of those that are watched."""
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        before = model(image)
        model.head.bias.data[3] += 1
        model.repack()
        after = model(image)
    torch.testing.assert_close(after[:, 3], before[:, 3] + 1)


def test_a_model_that_nobody_touched_is_packed_once():
    model = tiny()
    with torch.no_grad():
        model(picture(model))
        engine = model.engines.ready("fp32")
        for _ in range(3):
            model(picture(model))
            model.forward_features(picture(model))
    assert model.engines.ready("fp32") is engine


def test_weights_are_looked_at_once_in_a_forward(monkeypatch):
    calls = []
    stale = Engine.stale
    monkeypatch.setattr(Engine, "stale", lambda self: calls.append(1) or stale(self))
    model = tiny()
    with torch.no_grad():
        model(picture(model))
        calls.clear()
        model(picture(model))
    assert len(calls) == 1


def test_a_fingerprint_refuses_what_it_cannot_read():
    x = torch.ones(4, 6)
    good = (x.data_ptr(), 4, [4, 6], [6, 1])
    watched = _C.Fingerprint([good, (0, 4, [0, 3], [3, 1]), (x.data_ptr(), 4, [], [])])
    assert watched.matches()
    x.neg_()
    assert not watched.matches()
    for bad in (
        (0, 4, [4], [1]),
        (x.data_ptr(), 8, [4], [1]),
        (x.data_ptr(), 4, [4], [1, 1]),
        (x.data_ptr(), 4, [-4], [1]),
        (x.data_ptr(), 4, [4], [-1]),
        (x.data_ptr(), 4, [2**40, 2**40], [0, 0]),
        (x.data_ptr(), 4, [2], [2**61]),
    ):
        with pytest.raises((ValueError, OverflowError), match="vitkern fingerprint"):
            _C.Fingerprint([bad])
    with pytest.raises(TypeError, match="without __init__"):
        _C.Fingerprint.__new__(_C.Fingerprint).matches()


def test_an_engine_that_another_thread_left_behind_is_looked_at(monkeypatch):
    """It packed the old weights while this thread wrote to them."""
    model, engines = tiny(), {}
    packed, written = threading.Event(), threading.Event()

    class Slow(CpuEngine):
        def __init__(self, *given):
            super().__init__(*given)
            packed.set()
            assert written.wait(60)

    def ask(name):
        engines[name] = model.engines.ready("fp32")

    monkeypatch.setattr(base, "engine_class", lambda device: Slow)
    threads = [threading.Thread(target=ask, args=(name,)) for name in ("left", "fresh")]
    threads[0].start()
    assert packed.wait(60)
    with torch.no_grad():
        model.head.weight.add_(1)
    threads[1].start()  # finds no engine yet, and waits for the one that is being packed
    written.set()
    for thread in threads:
        thread.join()
    left, fresh = engines["left"], engines["fresh"]
    assert fresh is not left and left.stale() and not fresh.stale()
    assert model.engines.packed() == [fresh]


def test_a_replaced_parameter_leaves_no_engine():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        model(image)
        model.head.weight = nn.Parameter(model.head.weight * 2)
        assert model.engines.structure() and not model.engines.packed()
        torch.testing.assert_close(model(image), copy.deepcopy(model)(image))


def test_hooks_and_modes_keep_an_engine_of_the_same_weights():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        model(image)
        engine = model.engines.ready("fp32")
        handle = model.blocks[0].register_forward_hook(lambda *_: None)
        assert "has a hook" in model.explain(image)
        handle.remove()
        model(image)
        assert model.engines.ready("fp32") is engine


def test_a_shallow_copy_has_engines_of_its_own():
    """As DataParallel makes them: another model whose attributes are the same objects."""
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        want = model(image)
        twin = copy.copy(model)
        assert twin.engines is not model.engines and torch.equal(twin(image), want)


def test_models_with_engines_are_freed():
    """Whatever watches the modules must not keep them alive."""
    model = tiny()
    with torch.no_grad():
        model(picture(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", (places, Places), ids=("native", "plain"))
def test_places_see_writes_and_other_memory_sizes_and_strides(kind):
    weights = tuple(nn.Parameter(torch.randn(6, 6)) for _ in range(3))
    seen = kind(weights)
    assert seen.match(weights)
    for change in (torch.clone, torch.t, lambda t: t[:4], lambda t: t.view(4, 9)):
        before = weights[1].data
        weights[1].data = change(before)
        assert not seen.match(weights)
        weights[1].data = before
        assert seen.match(weights)
    with torch.no_grad():
        weights[2][3, 3] = 1
    assert not seen.match(weights)


@pytest.mark.parametrize("kind", (places, Places), ids=("native", "plain"))
def test_places_see_another_dtype_of_the_same_memory(kind):
    weights = (nn.Parameter(torch.randn(6, 6, dtype=torch.bfloat16)),)
    seen = kind(weights)
    weights[0].data = weights[0].data.view(torch.float16)
    assert not seen.match(weights)


class Attributes:
    """Whose attributes have been looked at as a dict, as those of a module that is watched."""


WRITES = {  # to a dict with "a": None and "b": 1
    "another value": lambda table, owner: table.update(a=1),
    "another attribute": lambda table, owner: setattr(owner, "a", 1),
    "a new entry": lambda table, owner: table.update(c=1),
    "a new attribute": lambda table, owner: setattr(owner, "c", 1),
    "none in the place of one": lambda table, owner: (table.pop("b"), table.update(c=1)),
    "a removal": lambda table, owner: table.pop("a"),
    "another order": lambda table, owner: table.update(a=table.pop("a")),
    "no entries": lambda table, owner: table.clear(),
    "one by setdefault": lambda table, owner: table.setdefault("c"),
    "a merge": lambda table, owner: table.__ior__({"c": 1}),
}


@pytest.mark.parametrize("again", (False, True), ids=("once", "later"))
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_watch_sees_every_write(write, again):
    owner = Attributes()
    owner.a, owner.b = None, 1
    table = owner.__dict__
    order = (table, "a", None, table, "b", 1)
    watch, facts = _C.Watch(), ((table,), order, (table, "a", None), (table, "c"), (), ())
    assert watch.holds(*facts)
    if again:
        table["c"] = table.pop("b")
        assert not watch.holds(*facts)
        table["b"] = table.pop("c")
        assert all(watch.holds(*facts) for _ in range(3))
    for _ in range(20):  # the interpreter specialises what is written often
        owner.b = 2
        owner.b = 1
        assert watch.holds(*facts)
    write(table, owner)
    assert not watch.holds(*facts) and not watch.holds(*facts)


def test_what_is_watched_is_checked():
    table = {"a": None}
    facts = {"entries": (), "absent": (), "tables": (), "empty": (), "types": ()}
    good = {
        "entries": (table, "a", None), "absent": (table, "b"), "tables": (table, "a", None),
        "empty": ({},), "types": (table, dict),
    }  # fmt: skip
    assert _C.unchanged(**good)
    for name, value in {
        "entries": (table, "a", 1), "absent": (table, "a"), "tables": (table, "a", 1),
        "empty": (table,), "types": (table, list),
    }.items():  # fmt: skip
        assert not _C.unchanged(**{**facts, name: value}), name
    for name, value in {
        "entries": (table, "a"), "absent": (table,), "tables": (table, "a"), "empty": (1,),
        "types": (table,),
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match="vitkern unchanged: expected"):
            _C.unchanged(**{**facts, name: value})
    with pytest.raises(TypeError, match="vitkern unchanged: expected a dict"):
        _C.Watch().holds((1,), (), (), (), (), ())
    with pytest.raises(TypeError, match="without __init__"):
        _C.Watch.__new__(_C.Watch).holds((), (), (), (), (), ())
    with pytest.raises(TypeError, match="the given class"):
        _C.Places(torch.Tensor, torch.Tensor._version, (1,))
    with pytest.raises(AttributeError):
        _C.Places(int, torch.Tensor._version, ())
    with pytest.raises(TypeError, match="a property of the class"):
        _C.Places(torch.Tensor, int.real, ())
    with pytest.raises(TypeError, match="the given class"):
        _C.Places(torch.Tensor, torch.Tensor._version, (torch.ones(1),)).match((1,))
    with pytest.raises(TypeError, match="it was made with"):
        _C.Places(torch.Tensor, torch.Tensor._version, ()).match((torch.ones(1),))
    with pytest.raises(TypeError, match="without __init__"):
        _C.Places.__new__(_C.Places).match(())
    with pytest.raises(TypeError, match="as many values"):
        _C.reads(torch.Tensor.data_ptr, (torch.ones(1),), ())
    with pytest.raises(TypeError):
        _C.reads(torch.Tensor.data_ptr, (1,), (1,))
    with pytest.raises(TypeError, match="has the property"):
        _C.reads(torch.Tensor._version, (1,), (1,))
    assert _C.reads(torch.Tensor._version, (torch.ones(1),), (0,))
    assert _C.reads(torch.Tensor.stride, (torch.ones(2, 3),), ((3, 1),))
