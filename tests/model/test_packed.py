"""`forward_packed`: images of any sizes in one call, each with the bits that it has alone."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.tiny_models import OPTIONS, check_error, force, tiny
from vitkern import cpu, dispatch
from vitkern.engines.cpu import CpuEngine
from vitkern.precision import CHOICES

GRIDS = ((6, 4), (1, 1), (3, 9), (6, 4), (4, 6), (9, 8), (1, 5))


def mixed(**changes):
    return tiny(**{"dynamic_image_size": True, **changes})


def pictures(model, grids=GRIDS, seed=3):
    """An image (C, Y, X) for each grid of patches."""
    g, c = torch.Generator().manual_seed(seed), model.config
    p = c.patch_pixels
    sizes = [(c.channels, p * y, p * x) for y, x in grids]
    return [torch.randn(size, generator=g, dtype=torch.float64).to(model.dtype) for size in sizes]


def assert_as_alone(model, images):
    """Logits and rows of every image are bit for bit those of the image alone."""
    logits = model.forward_packed(images)
    rows = model.forward_packed(images, features=True)
    assert len(logits) == len(rows) == len(images)
    for image, y, tokens in zip(images, logits, rows, strict=True):
        assert torch.equal(y, model(image[None])[0])
        assert torch.equal(tokens, model.forward_features(image[None])[0])


@pytest.mark.parametrize("path", ("fused", "engine"))
@pytest.mark.parametrize("option", OPTIONS)
def test_an_image_has_the_bits_that_it_has_alone(option, path):
    model = mixed(**OPTIONS[option])
    images = pictures(model)
    with torch.inference_mode():
        assert_as_alone(force(model, path, images[0][None]), images)


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("precision", CHOICES)
def test_on_every_instruction_set(isa, precision):
    model = mixed()
    engine = CpuEngine(model, precision, isa=isa)
    batches = [image[None] for image in pictures(model)]
    with torch.inference_mode():
        alone = torch.cat([engine.logits(image) for image in batches])
        assert torch.equal(engine.mixed_logits(batches), alone)
        for rows, image in zip(engine.mixed_tokens(batches), batches, strict=True):
            assert torch.equal(rows, engine.tokens(image))


@pytest.mark.parametrize("pool", ("token", "mean"))
def test_matches_the_reference(pool):
    model = mixed(pool=pool)
    images = pictures(model)
    wide = copy.deepcopy(model).double()
    wide.path = "reference"
    with torch.no_grad():
        truth = wide.forward_packed([image.double() for image in images])
        ours = model.forward_packed(images)
        model.path = "reference"
        with FixedOrder():
            torchs = model.forward_packed(images)
    check_error(ours, torchs, truth, torch.float32, "packed logits")


# Images of more rows than a group has, between them many that share one; one that outweighs the
# others; fewer than threads.
LISTS = {
    "long and short": [(14, 15), (1, 1), (2, 2), (12, 20), (1, 2), (3, 3), (15, 15), (2, 1)],
    "one outweighs the others": [(2, 2), (1, 3), (30, 20), (2, 1), (1, 1)],
    "two": [(16, 16), (9, 3)],
    "equal tokens, other shapes": [(4, 6), (6, 4), (3, 8), (8, 3), (2, 12), (24, 1), (1, 24)],
}


@pytest.mark.parametrize("threads", (1, 2, 3, 5))
@pytest.mark.parametrize("name", LISTS)
def test_neither_threads_nor_neighbours_show(name, threads):
    model = mixed(depth=2, position="sincos_2d")
    images = pictures(model, LISTS[name])
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            alone = torch.cat([model(image[None]) for image in images])
            torch.set_num_threads(threads)
            assert torch.equal(model.forward_packed(images), alone)
            assert torch.equal(model.forward_packed(images[::-1]), alone.flip(0))
            assert torch.equal(model.forward_packed(images[1:3] * 4), alone[1:3].repeat(4, 1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("position", ("learned", "relative"))
def test_more_sizes_than_are_remembered(position):
    model = mixed(depth=1, position=position)
    grids = [(y, x) for y in range(1, 10) for x in range(1, 10 if position == "learned" else 3)]
    with torch.inference_mode():
        assert_as_alone(model, pictures(model, grids))


@pytest.mark.parametrize(
    "changes", ({}, {"pool": "mean"}, {"position": "relative"}, {"dropout": 0.2, "drop_path": 0.3})
)
def test_gradients_are_those_of_the_images_one_by_one(changes):
    model = mixed(**changes).double().train()
    images = [image.requires_grad_() for image in pictures(model, GRIDS[:4])]
    inputs = [*images, *model.parameters()]
    torch.manual_seed(5)
    y = model.forward_packed(images)
    got = torch.autograd.grad(y.square().sum(), inputs)
    torch.manual_seed(5)
    one_by_one = torch.cat([model(image[None]) for image in images])
    wanted = torch.autograd.grad(one_by_one.square().sum(), inputs)
    torch.testing.assert_close(y, one_by_one)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradient_checkpointing():
    model = mixed().train()
    model.set_grad_checkpointing()
    images = pictures(model, GRIDS[:2])
    model.forward_packed(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", ("bf16 model", "bf16 precision", "autocast", "bytes", "strided"))
def test_dtypes_and_layouts(kind):
    model = mixed(mean=(0.5,) * 3, std=(0.3,) * 3)
    images, context = pictures(model), torch.autocast("cpu", enabled=kind == "autocast")
    if kind == "bf16 model":
        model, images = model.bfloat16(), [image.bfloat16() for image in images]
    elif kind == "bf16 precision":
        model.precision = "bf16"
    elif kind == "bytes":
        images = [image.mul(40).add(128).clamp(0, 255).byte() for image in images]
    elif kind == "strided":
        images = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images]
    with torch.inference_mode(), context:
        assert_as_alone(model, images)
        assert model.forward_packed(images).dtype == model(images[0][None]).dtype


def test_nan_stays_in_its_image():
    model = mixed()
    images = pictures(model)
    with torch.inference_mode():
        clean = model.forward_packed(images)
        images[3][0, 0, 0] = float("nan")
        spoiled = model.forward_packed(images)
    assert spoiled[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(spoiled[others], clean[others])


def test_an_empty_list():
    model = mixed()
    with torch.inference_mode():
        assert model.forward_packed([]).shape == (0, 37)
        assert model.forward_packed((), features=True) == []
        assert mixed(pool="none").forward_packed([]) == []
        assert mixed(classes=0).forward_packed([]).shape == (0, 32)


def test_a_model_of_one_size_takes_images_of_that_size():
    model = tiny()
    images = pictures(model, [(6, 4)] * 3)
    with torch.inference_mode():
        assert_as_alone(model, images)
        with pytest.raises(ValueError, match=r"images\[1\] is 8x16 pixels, the model takes 24x16"):
            model.forward_packed([images[0], images[1][:, :8]])


def test_a_hook_or_a_subclass_is_honoured():
    class Marked(torch.Tensor):
        pass

    model, seen = mixed(), []
    images = pictures(model, GRIDS[:3])
    with torch.no_grad():
        model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
        assert_as_alone(model, images)
        assert len(seen) == 4 * len(images)
        assert type(mixed().forward_packed([*images, images[0].as_subclass(Marked)])) is Marked


PLAIN = torch.zeros(3, 8, 8)
BAD_LISTS = {
    "must be a list or tuple of (C, Y, X) tensors, not a Tensor; pass list(images)": PLAIN[None],
    "must be a list or tuple of (C, Y, X) tensors, not a generator": (i for i in [PLAIN]),
    "images[1] must be a torch.Tensor, got ndarray": [PLAIN, PLAIN.numpy()],
    "images[0] must be a torch.Tensor, got NoneType": [None],
    "images[1] has shape (1, 3, 8, 8), expected (C, Y, X); pass its images": [PLAIN, PLAIN[None]],
    "images[0] has shape (8, 8), expected (C, Y, X)": [PLAIN[0]],
    "images[1] has 1 channels, the model takes 3": [PLAIN, PLAIN[:1]],
    "images[0] has 8 channels, the model takes 3; it looks like": [PLAIN.permute(1, 2, 0)],
    "images[1] is 8x6 pixels, each side must be a multiple of the patch": [PLAIN, PLAIN[..., :6]],
    "images[0] is 0x8 pixels": [PLAIN[:, :0]],
    "images[1] has dtype torch.float64, images[0] torch.float32": [PLAIN, PLAIN.double()],
    "images[1] has device meta, images[0] cpu": [PLAIN, PLAIN.to("meta")],
    "images[0] is torch.float64, the model torch.float32; convert it with images[0].to": [
        PLAIN.double()
    ],
    "images[0] is torch.int64, expected torch.float32 or uint8": [PLAIN.long()],
    "uint8 images need the pixel mean and std": [PLAIN.byte()],
    "images[0] has layout torch.sparse_coo; pass images[0].to_dense()": [PLAIN.to_sparse()],
}


@pytest.mark.parametrize("message", BAD_LISTS)
def test_bad_lists_are_refused(message):
    with pytest.raises((TypeError, ValueError)) as error, torch.inference_mode():
        mixed().forward_packed(BAD_LISTS[message])
    assert message in str(error.value)


def test_on_a_gpu_the_fused_operators_serve():
    """Where path says "engine", the error names what does."""
    model = mixed()
    with FakeTensorMode():
        weight = torch.empty(1, device="cuda")
    with torch.inference_mode():
        assert dispatch.decide(model, None, "mixed", weight).path == "fused"
        model.path = "engine"
        with pytest.raises(RuntimeError, match="images of one size, the fused operators of any"):
            dispatch.decide(model, None, "mixed", weight)
