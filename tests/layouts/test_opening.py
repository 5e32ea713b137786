"""What predict, serve, inspect and embed open: one function."""

import pytest
import torch

from vitkern import ViT
from vitkern.opening import opened


@pytest.mark.parametrize(
    "name", ["Ti/16", "vit_pe_core_tiny_patch16_384", "eva02_tiny_patch14_224"]
)
def test_a_name_tells_what_tensors_do_not(name, tmp_path):
    torch.manual_seed(0)
    model, path = ViT(name, classes=5).eval(), tmp_path / "weights.pt"
    torch.save(model.state_dict(), path)
    found = opened(path, name).model
    image = torch.randn(1, 3, *model.config.pixels)
    assert found.config == model.config
    with torch.no_grad():
        assert torch.equal(found(image), model(image))


def test_weights_of_another_dtype_are_opened_in_fp32(tmp_path):
    model = ViT("Ti/16", image_size=32, classes=5).bfloat16()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    found = opened(tmp_path / "weights.pt", "Ti/16")
    assert found.model.dtype == torch.float32 and found.names is None and not found.model.training
    with pytest.raises(ValueError, match=r"weights.pt is no S/16: its width is 192, not 384"):
        opened(tmp_path / "weights.pt", "S/16")


def test_a_name_without_weights_is_refused():
    with pytest.raises(ValueError, match="--model names the architecture of --weights"):
        opened(None, "Ti/16")
