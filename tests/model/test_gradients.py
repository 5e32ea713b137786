"""Training a model by the native backwards: everything that PyTorch lets one do around it."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.tiny_models import BASE, force, tiny
from vitkern import ViT, cpu_blas, ops
from vitkern.contract import judge

IMAGES = torch.randn(4, 3, *BASE.image_size, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 5, 36])


def made(path=None):
    torch.manual_seed(0)
    model = ViT(BASE).train()
    if path is not None:
        model.path = path
    return model


def gradients(model, run=None, images=IMAGES, labels=LABELS):
    """By name, of one backward; those there were before are added to."""
    F.cross_entropy((model if run is None else run)(images).float(), labels).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_alike(got, expected, room=1e-4):
    for name, want in expected.items():
        if want is None:
            assert got[name] is None, name
            continue
        miss = (got[name] - want).norm() / want.norm().clamp_min(1e-8)
        assert miss < room, f"{name}: {miss:.1e}"


@pytest.fixture
def expected():
    """Gradients of the same model, module by module in plain PyTorch."""
    return gradients(made("reference"))


def test_accumulated_gradients_are_those_of_the_whole_batch(expected):
    model = made()
    for part in (slice(0, 2), slice(2, 4)):
        got = gradients(model, images=IMAGES[part], labels=LABELS[part])
    assert_alike({name: g / 2 for name, g in got.items()}, expected)


def test_checkpointed_blocks_have_the_same_gradients(expected):
    model = made()
    model.set_grad_checkpointing(True)
    assert_alike(gradients(model), expected)


def test_a_compiled_model_has_the_same_gradients(expected):
    model = made()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_alike(gradients(model, run), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["forward", "backward-too"])
def test_autocast_s_gradients_are_fp32_and_close(inside, expected):
    model = made()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(IMAGES).float(), LABELS)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    assert all(g.dtype == torch.float32 for g in got.values())
    assert_alike(got, expected, room=0.05)


@pytest.mark.parametrize("trained", ["head", "bias", "blocks.2.mlp"])
def test_frozen_parameters_get_none_and_the_rest_what_they_had(trained, expected):
    model = made()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    assert_alike(gradients(model), {n: g if trained in n else None for n, g in expected.items()})


def test_no_matmul_is_spent_on_a_frozen_weight(monkeypatch):
    """Bias-only training: of a layer's two matmuls in the backward only dx is left."""
    monkeypatch.setattr(cpu_blas, "_is_faster", lambda weight: True)
    shapes = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: shapes.append(a.shape) or mm(a, b, **k))
    model = made()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    loss = F.cross_entropy(model(IMAGES), LABELS)
    shapes.clear()
    loss.backward()
    rows = {4 * 25, 4}  # tokens, and those of the head; a weight's gradient has others
    assert shapes and {shape[0] for shape in shapes} <= rows, shapes


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch.mm", "native"])
def test_gradients_keep_the_contract_whoever_multiplies(by_torch, monkeypatch):
    """torch.mm is what a CPU with AMX or without AVX-512 chooses, and no other.

    All parameters count together, each in units of its rms, as one of 32 elements has no stable
    error of its own.
    """
    monkeypatch.setattr(cpu_blas, "_is_faster", lambda weight: by_torch)
    multiplied, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: multiplied.append(1) or mm(*a, **k))
    found, torchs, truths = [], [], []
    for seed in (2, 3, 4):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(24, *IMAGES.shape[1:], generator=generator)
        labels = torch.randint(0, BASE.classes, (24,), generator=generator)
        plain, truth = (force(tiny(), "reference", None).train() for _ in range(2))
        exact = gradients(truth.double(), images=images.double(), labels=labels)
        with FixedOrder():
            theirs = gradients(plain, images=images, labels=labels)
        ours = gradients(tiny().train(), images=images, labels=labels)
        for all_of, one in ((found, ours), (torchs, theirs), (truths, exact)):
            all_of += [one[name].double() / exact[name].square().mean().sqrt() for name in exact]
    assert bool(multiplied) == by_torch
    got, yardstick, want = (torch.cat([t.flatten() for t in ts]) for ts in (found, torchs, truths))
    verdict = judge(got, yardstick, want, dtype=torch.float32)
    assert verdict.passed, verdict.problem


@sdpa_kernel(SDPBackend.MATH)  # the one that has derivatives of every kind
def test_derivatives_of_second_order_are_the_references():
    def penalty(model, images):
        images = images.requires_grad_()
        (slope,) = torch.autograd.grad(model(images).square().sum(), images, create_graph=True)
        slope.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    want = penalty(made("reference").double(), IMAGES.double())
    assert_alike(penalty(made().double(), IMAGES.double()), want, room=1e-8)
    assert_alike({name: g.double() for name, g in penalty(made(), IMAGES.clone()).items()}, want)


@sdpa_kernel(SDPBackend.MATH)
def test_vmap_and_forward_mode_follow_the_reference():
    model, plain = (made(path).eval().requires_grad_(False) for path in (None, "reference"))
    tangent = torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(1))
    for transform in (
        lambda m: torch.func.vmap(torch.func.grad(lambda x: m(x[None]).square().sum()))(IMAGES),
        lambda m: torch.func.jvp(m, (IMAGES,), (tangent,))[1],
    ):
        torch.testing.assert_close(transform(model), transform(plain), rtol=1e-3, atol=1e-4)


def test_what_a_block_saves_is_less_than_eager_keeps():
    """Bytes that autograd holds between forward and backward; views of one storage count once."""

    def saved(path):
        held = {}
        model = made(path)

        def pack(t):
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(IMAGES).sum()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        total = sum(size for at, size in held.items() if at not in weights)
        del loss
        return total

    assert saved("fused") < 0.75 * saved("reference")


@pytest.mark.parametrize(
    "changes, rows",
    [
        ({}, 1),
        ({"head": "distilled"}, 2),
        ({"drop_path": 0.5}, 1),
        ({"projection_dropout": 0.25}, 25),  # its mask is drawn for the elements of all rows
        ({"pool": "mean"}, 25),
    ],
    ids=["token", "distilled", "drop-path", "dropout", "mean"],
)
def test_the_last_block_computes_the_rows_that_the_head_reads(changes, rows, monkeypatch):
    shapes, mlp = [], ops.mlp
    monkeypatch.setattr(ops, "mlp", lambda x, *a, **k: shapes.append(x.shape) or mlp(x, *a, **k))
    found = []
    for path in ("reference", "fused"):
        torch.manual_seed(0)
        model = ViT(BASE.replace(**changes)).train()
        model.path = path
        torch.manual_seed(1)  # of the masks
        found.append(gradients(model))
    assert shapes[-1][1] == rows
    assert_alike(found[1], found[0])
