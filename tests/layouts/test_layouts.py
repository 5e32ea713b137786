"""Every layout against the library that it comes from: outputs, gradients, and the way back."""

import contextlib
import copy
import functools

import pytest
import torch

import vitkern
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.layouts.foreign_models import (
    CASES,
    DINOV2,
    RELATIVE,
    SIZES,
    randomised,
    transformers_model,
)  # fmt: skip
from tests.model.tiny_models import check_error
from vitkern.weights import layouts
from vitkern.weights.layouts.base import Refused

# transformers takes seconds to import a model: the others' cases are in the default run.
QUICK = ("timm", "timm-registers", "timm-beit", "timm-eva02-normed", "timm-dinov3", "torchvision",
         "hf-vit", "jax", "big-vision-scan", "dino", "dinov2", "mae", "open-clip")  # fmt: skip
marked = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.full]) for n in CASES]


@functools.cache
def made(name, folder):
    """The foreign model, and the path that its own library wrote."""
    case = CASES[name]
    if case.library:
        pytest.importorskip(case.library, exc_type=ImportError)
    model = case.make()
    return model, case.write(model, folder)


@pytest.fixture
def foreign(request, tmp_path_factory):
    name = request.param
    return name, *made(name, tmp_path_factory.mktemp(name))


every = pytest.mark.parametrize("foreign", marked, indirect=True)


def image(dtype=torch.float32, batch=3):
    g = torch.Generator().manual_seed(3)
    return torch.randn(batch, 3, 32, 32, generator=g).to(dtype)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_outputs_keep_the_contract(foreign, dtype):
    name, theirs, path = foreign
    case = CASES[name]
    ours = vitkern.load(path, dtype=dtype, **case.options)
    theirs = copy.deepcopy(theirs).to(dtype)
    # Gradients stay on: without them torchvision's attention is one operator of unknown order.
    # BEiT interpolates its tables, also to their own size: FixedOrder has no such operator.
    order = contextlib.nullcontext() if name.startswith("hf-beit") else FixedOrder()
    with order:
        torchs = case.ask(theirs, image(dtype)).detach()
    with torch.no_grad():
        got = ours(image(dtype))
        truth = case.ask(theirs.double(), image(dtype).double())
    check_error(got, torchs, truth, dtype, name)


@every
def test_gradients_keep_the_contract(foreign):
    """Of the images: every weight has its share in them. So many, because a few rows of a tiny
    model make most of the error: of three images it is 0.5 to 2 times PyTorch's by chance."""
    name, theirs, path = foreign
    case = CASES[name]
    ours = vitkern.load(path, dtype=torch.float32, **case.options)
    grads = []
    for model, ask in (
        (ours, None),
        (theirs, case.ask),
        (copy.deepcopy(theirs).double(), case.ask),
    ):
        x = image(next(model.parameters()).dtype, batch=24).requires_grad_()
        y = model(x) if ask is None else ask(model, x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        grads.append(x.grad)
    check_error(*grads, torch.float32, f"gradients of {name}")


@every
def test_exports_what_its_library_reads(foreign, tmp_path):
    name, theirs, path = foreign
    case = CASES[name]
    if not case.export:
        pytest.skip("this layout has no export")
    ours = vitkern.load(path, **case.options)
    folder = case.export.startswith("hf_")
    written = (
        tmp_path / f"out{'' if folder else '.npz' if case.export == 'jax' else '.safetensors'}"
    )
    assert vitkern.save(ours, written, case.export) == case.export
    again = vitkern.load(written, **case.options)
    assert torch.equal(again(image()), ours(image()))
    state = ours.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in again.state_dict().items())
    if case.library == "transformers":
        reader = type(theirs)
        back, info = reader.from_pretrained(written, output_loading_info=True)
        assert not info["unexpected_keys"] and not info["mismatched_keys"]
        assert all(key.startswith(("head.", "vision_model.head.")) for key in info["missing_keys"])
        with torch.no_grad():
            torch.testing.assert_close(
                case.ask(back.eval(), image()), case.ask(theirs, image()), rtol=0, atol=1e-5
            )
    elif case.library:
        import safetensors.torch

        theirs = copy.deepcopy(theirs)
        with torch.no_grad():
            for p in theirs.parameters():
                p.zero_()
        theirs.load_state_dict(safetensors.torch.load_file(written))
        with torch.no_grad():
            torch.testing.assert_close(theirs(image()), ours(image()), rtol=0, atol=1e-5)


@every
def test_layout_is_found_by_names_alone(foreign):
    name, theirs, _ = foreign
    if CASES[name].library:
        layout, _ = layouts.detect(theirs.state_dict())
        assert layout.name == CASES[name].layout


def test_every_layout_is_tried():
    assert {case.layout for case in CASES.values()} == set(layouts.BY_NAME)


@pytest.mark.full
def test_siglip_2_with_native_sizes(tmp_path):
    """It multiplies flat patches, and is given them cut, colours last."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    sizes = {k: v for k, v in SIZES.items() if k != "image_size"} | {"num_patches": 16}
    theirs = randomised(transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**sizes)))
    theirs.save_pretrained(tmp_path)
    x = image()
    patches = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(3, 16, -1)
    mask, grids = torch.ones(3, 16, dtype=torch.long), torch.tensor([[4, 4]] * 3)
    with torch.no_grad():
        wanted = theirs(patches, pixel_attention_mask=mask, spatial_shapes=grids).last_hidden_state
        got = vitkern.load(tmp_path, pool="none")(x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


REFUSED = {
    "a bias of the keys": ("DINOv3ViTModel", "DINOv3ViTConfig", SIZES | {"key_bias": True}),
    "a classifier of the class token beside": (
        "Dinov2ForImageClassification", "Dinov2Config", DINOV2,
    ),
    "learned positions beside relative ones": (
        "BeitModel", "BeitConfig", RELATIVE | {"use_absolute_position_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("piece", REFUSED)
def test_what_vitkern_lacks_is_named(piece, tmp_path):
    pytest.importorskip("transformers", exc_type=ImportError)
    transformers_model(*REFUSED[piece]).save_pretrained(tmp_path)
    said = f"needs {piece}.*, which vitkern does not have yet"
    with pytest.raises(Refused, match=said) as error:
        vitkern.load(tmp_path)
    if "classes=0" in str(error.value):
        assert vitkern.load(tmp_path, classes=0).config.classes == 0
