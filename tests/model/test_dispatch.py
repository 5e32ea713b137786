"""Which path runs: hooks, replaced modules, compilers, precisions; and what every path promises."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from tests.model.tiny_models import OPTIONS, PATHS, force, picture, tiny
from vitkern import dispatch


def test_explains_its_path():
    model = tiny()
    image = picture(model)
    assert "path: fused" in model.explain(image) and "gradients are enabled" in model.explain()
    model.train()
    with torch.no_grad():
        assert "training mode" in model.explain(image)
    model.path = "reference"
    assert "path: reference" in model.explain(
        image
    ) and 'model.path is "reference"' in model.explain(image)


def test_engine_runs_by_itself_in_inference():
    model = tiny()
    with torch.inference_mode():
        text = model.explain(picture(model))
    assert "path: engine" in text and "precision: fp32" in text, text


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(linear):
    twin = Doubled(linear.in_features, linear.out_features)
    twin.load_state_dict(linear.state_dict())
    return twin


@pytest.mark.parametrize("mode", ["eval", "train", "compiled"])
def test_replaced_module_is_honoured(mode):
    model = tiny().train(mode == "train")
    image = picture(model)
    run = torch.compile(model, backend="eager") if mode == "compiled" else model
    with torch.no_grad():
        before = run(image)
        model.head = doubled(model.head)
        torch.testing.assert_close(run(image), 2 * before, rtol=1e-4, atol=1e-4)
        assert "head is a Doubled" in model.explain(image)


@pytest.mark.parametrize(
    "place", ["blocks.1", "blocks.1.attn", "blocks.2.mlp.act", "patch_embed.proj", "head"]
)
def test_hooks_fire_and_may_change_results(place):
    model = tiny()
    image, calls = picture(model), []
    with torch.no_grad():
        before = model(image)
        handle = model.get_submodule(place).register_forward_hook(
            lambda m, i, o: calls.append(1) or o * 0
        )
        after = model(image)
        assert len(calls) == 1 and not torch.allclose(before, after)
        assert f"{place} has a hook" in model.explain(image)
        handle.remove()
        assert torch.equal(model(image), before)


def test_other_ways_to_change_a_module_are_seen():
    image = picture(tiny())
    model = tiny()
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    assert "path: reference" in model.explain(image)
    model = tiny()
    model.norm.forward = lambda x: x
    assert "norm.forward was replaced" in model.explain(image)
    model = tiny()
    model.blocks[1].ls1 = nn.Dropout(0.5)
    assert "blocks.1.ls1 is a Dropout" in model.explain(image)
    model = tiny()
    model.blocks = model.blocks[:2]
    assert model.eval()(image).shape == (5, 37)
    model = tiny()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model(image).sum().backward()


def test_hook_on_the_model_itself_does_not_slow_it():
    model, seen = tiny(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    model(picture(model))
    assert seen and "path: fused" in model.explain()


def test_flop_counter_and_vmap_see_plain_operators():
    model = tiny(torch.float64)
    image = picture(model, B=2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    c, work = model.config, model.summary(show=False).multiply_adds
    work -= c.depth * 2 * c.tokens**2 * c.width  # torch does not count attention on the CPU
    assert counter.get_total_flops() == 2 * 2 * work  # two images, two flops
    one_by_one = torch.func.vmap(lambda x: model(x[None])[0])(image)
    torch.testing.assert_close(one_by_one, model(image))


@pytest.mark.parametrize("training", [True, False])
def test_compiles_to_one_graph(training):
    model = tiny(dropout=0.1, drop_path=0.2).train(training)
    image = picture(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    got = run(image)
    got.sum().backward()
    torch.manual_seed(1)
    torch.testing.assert_close(got, model(image))


def test_exports():
    model = tiny()
    image = picture(model)
    for path, own in (("auto", False), ("fused", True)):
        model.path = path
        exported = torch.export.export(model, (image,))
        torch.testing.assert_close(exported.module()(image), model(image))
        assert any("vitkern" in str(node.target) for node in exported.graph.nodes) is own


@pytest.mark.filterwarnings("ignore")  # the tracer warns about every size that Python reads
def test_traces():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, image)
        torch.testing.assert_close(traced(image), model(image), rtol=1e-4, atol=1e-4)


def test_autocast_keeps_the_residual_stream_in_fp32():
    model = tiny()
    image = picture(model)
    for path in PATHS[:2]:
        model.path = path
        with torch.autocast("cpu", torch.bfloat16):
            assert model.forward_features(image).dtype == torch.float32, path
            logits = model(image)
        assert logits.dtype == torch.bfloat16, path
        torch.testing.assert_close(logits.float(), model(image), rtol=0.1, atol=0.2)


def test_autocast_governs_the_engine_too():
    model = tiny()
    image = picture(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        text, got = model.explain(image), model(image)
        assert model.forward_features(image).dtype == torch.float32
    assert "path: engine" in text and "precision: bf16" in text and got.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert "not fp16" in model.explain(image) and model(image).dtype == torch.float16


def test_engine_is_refused_when_modules_leave_the_configuration():
    model = tiny()
    image = picture(model)
    with torch.no_grad():
        before = model(image)
        model.blocks[1].norm1.eps = 0.5
        assert "blocks.1.norm1.eps is 0.5" in model.explain(image)
        assert not torch.allclose(model(image), before, atol=1e-3)
        model.blocks[1].norm1.eps = 1e-6
        model.head = nn.Linear(32, 9)
        assert "the head has 9 outputs" in model.explain(image) and model(image).shape == (5, 9)


def test_autocast_trains():
    model = tiny().train()
    with torch.autocast("cpu", torch.bfloat16):
        model(picture(model)).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_is_its_images_one_by_one(path):
    model = tiny()
    image = picture(model, B=7)
    force(model, path, image)
    with torch.no_grad():
        whole, single = model(image), torch.cat([model(x[None]) for x in image])
    if path == "engine":
        assert torch.equal(whole, single)
    torch.testing.assert_close(whole, single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_non_contiguous_images_are_read_in_place(path):
    model = tiny()
    image = picture(model, B=3)
    force(model, path, image)
    others = {
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "sliced": torch.cat([image, image], 3)[..., : image.shape[3]],
        "transposed": image.mT.contiguous().mT,
        "reversed batch": image.flip(0).flip(0),
        "expanded": image,
    }
    with torch.no_grad():
        want = model(image)
        for layout, twin in others.items():
            torch.testing.assert_close(model(twin), want, rtol=1e-5, atol=1e-5, msg=layout)
        alike = model(image[:1].expand(3, -1, -1, -1))
    torch.testing.assert_close(alike[2], want[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_nan_stays_in_its_image(path):
    model = tiny()
    image = picture(model, B=3)
    image[1, 0, 0, 0] = float("nan")
    force(model, path, image)
    with torch.no_grad():
        got = model(image)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "option", ["plain", "pool-mean", "no-head", "pool-none", "position-relative"]
)
def test_empty_batch_gives_an_empty_result(option, path):
    model = tiny(**OPTIONS[option])
    image = picture(model, B=0)
    force(model, path, image)
    with torch.no_grad():
        assert model(image).shape == (0, *model(picture(model, B=1)).shape[1:])
        assert model.forward_features(image).shape == (0, model.config.tokens, 32)


@pytest.mark.parametrize("name", ("norm", "blocks.1.norm1", "blocks.0.norm2"))
def test_a_norm_without_weights_runs_module_by_module(name):
    """The operators need them; so also where a norm was a buffer's or has no bias."""
    model = tiny()
    norm = model.get_submodule(name)
    norm.bias = None
    with torch.no_grad():
        assert f"{name} has no parameter bias" in model.explain(picture(model))
        got = model(picture(model))
        model.path = "reference"
        assert torch.equal(got, model(picture(model)))


@contextlib.contextmanager
def global_hook():
    handle = register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


class Own(torch.Tensor):
    pass


MODELS = {
    "the same model": lambda model: None,
    "training": lambda model: model.train(),
    "another path": lambda model: setattr(model, "path", "fused"),
    "the reference": lambda model: setattr(model, "path", "reference"),
    "a precision": lambda model: setattr(model, "precision", "bf16"),
    "a model of another dtype": lambda model: model.bfloat16(),
    "a hook": lambda model: model.head.register_forward_hook(lambda *_: None),
}
MOMENTS = {
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "forward derivatives": forward_ad.dual_level,
    "a mode": lambda: FlopCounterMode(display=False),
    "a global hook": global_hook,
}
IMAGES = {
    "another batch": lambda x: x[:2],
    "another size": lambda x: x[..., :8],
    "no batch": lambda x: x[0],
    "float64": lambda x: x.double(),
    "uint8": lambda x: x.byte(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "a list": lambda x: [x],
    "a subclass": lambda x: x.as_subclass(Own),
}
SERVED = {"the same model", "a precision", "autocast", "another batch"}  # by the engine


@pytest.mark.parametrize("state", (*MODELS, *MOMENTS, *IMAGES))
def test_a_remembered_route_is_the_one_that_would_be_decided(state):
    """Whatever changed since a call like this one was served, the answer is a fresh model's."""
    found = []
    for warm in (False, True):
        model = tiny()
        image = picture(model)
        with torch.no_grad():
            if warm:
                for _ in range(2):
                    assert dispatch.choose(model, image, "logits").path == "engine"
            MODELS.get(state, MODELS["the same model"])(model)
            with MOMENTS.get(state, contextlib.nullcontext)():
                try:
                    other = IMAGES.get(state, lambda x: x)(image)
                    route = dispatch.choose(model, other, "logits")
                    found.append((route.path, route.reason, route.precision))
                except (TypeError, ValueError, RuntimeError) as error:
                    found.append((type(error), str(error)))
    assert found[0] == found[1] and (found[0][0] == "engine") == (state in SERVED), found


def test_results_are_ordinary_tensors_wherever_the_engine_was_packed():
    model = tiny()
    image = picture(model)
    with torch.inference_mode():
        assert model(image).is_inference()
    with torch.no_grad():
        got = model(image)
    assert not got.is_inference() and got.requires_grad_().sum().backward() is None
