"""Images of mixed sizes through the GPU's operators: attention by offsets, interpreted."""

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.gpu.contract import gpu
from tests.model.test_packed import mixed, pictures
from tests.model.tiny_models import check_error
from vitkern import packed
from vitkern.engines.trace import Launchers


def batches(model, dtype):
    return [image[None].to(dtype) for image in pictures(model, ((6, 4), (1, 1), (3, 9)))]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_matches_the_reference(dtype):
    model = mixed(depth=1, qk_norm=True, registers=1).to(dtype)
    images = batches(model, dtype)
    wide = mixed(depth=1, qk_norm=True, registers=1).to(dtype).double()
    with torch.no_grad():
        truth = torch.cat([wide.reference_forward(image.double()) for image in images])
        with FixedOrder():
            torchs = torch.cat([model.reference_forward(image) for image in images])
        with gpu("fp32"), Launchers():
            ours = torch.cat(packed.fused_forward(model, images, False))
    check_error(ours, torchs, truth, dtype, "packed logits")


@pytest.mark.full
def test_an_image_has_the_bits_that_it_has_alone():
    model = mixed(depth=1)
    images = batches(model, torch.float32)
    with torch.no_grad(), gpu("fp32"), Launchers():
        rows = packed.fused_forward(model, images, True)
        for image, got in zip(images, rows, strict=True):
            assert torch.equal(got, packed.fused_forward(model, [image], True)[0])
            assert torch.equal(got, model.fused_forward(image, head=False))


@pytest.mark.full
def test_gradients_flow_through_offsets():
    model = mixed(depth=1).double()
    images = batches(model, torch.float64)
    parameters = list(model.parameters())

    def gradients(results):
        return torch.autograd.grad(torch.cat(results).square().sum(), parameters)

    truth = gradients([model.reference_forward(image) for image in images])
    model = model.float()
    parameters = list(model.parameters())
    with gpu("fp32"), Launchers():
        ours = gradients(packed.fused_forward(model, [i.float() for i in images], False))
    for got, wanted in zip(ours, truth, strict=True):
        assert (got - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6
