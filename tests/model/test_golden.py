"""The real DeiT-Tiny reproduces the logits of 16 photographs, computed in float64 beforehand."""

import copy

import numpy as np
import pytest
import torch

import vitkern
from tests.model.tiny_models import PATHS
from vitkern import ViT
from vitkern.weights import timm as timm_weights

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def golden(shared_data):
    file = shared_data / "weights" / "deit_tiny_golden16.npz"
    if not file.is_file():
        pytest.skip(f"no golden logits at {file}")
    data, names = np.load(file), ("images_u8", "labels", "logits", "cls_features")
    return {name: torch.from_numpy(data[name]) for name in names}


@pytest.fixture(scope="module")
def model(shared_data):
    file = shared_data / "weights" / "deit_tiny_patch16_224.timm.safetensors"
    if not file.is_file():
        pytest.skip(f"no DeiT-Tiny weights at {file}")
    pytest.importorskip("safetensors")
    model = ViT("deit_tiny_patch16_224", mean=MEAN, std=STD)
    timm_weights.load(model, file)
    return model.eval()


def run(model, path, precision, image):
    model.path, model.precision = path, precision
    try:
        with torch.inference_mode():
            return model(image)
    finally:
        model.path, model.precision = "auto", None


# PyTorch's fp32 is off by 2e-5; bf16 keeps 8 bits, and logits reach 15.
@pytest.mark.parametrize("precision, allowed", [("fp32", 5e-5), ("bf16", 0.3)])
@pytest.mark.parametrize("path", PATHS)
def test_reproduces_golden_logits(model, golden, path, precision, allowed):
    image = golden["images_u8"].permute(0, 3, 1, 2)
    got = run(model, path, precision, image)
    miss = (got.double() - golden["logits"].double()).abs().max().item()
    print(f"DeiT-Tiny, {path}, {precision}: largest logit difference {miss:.2g}")
    assert got.dtype == torch.float32 and miss < allowed
    assert torch.equal(got.argmax(1), golden["logits"].argmax(1)), "the 16 predictions"
    assert (got.argmax(1) == golden["labels"]).sum() == 15


@pytest.mark.parametrize("path", PATHS)
def test_reproduces_golden_features(model, golden, path):
    pixels = golden["images_u8"].permute(0, 3, 1, 2).float() / 255
    image = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    got = run(model, path, "fp32", image)
    assert (got.double() - golden["logits"].double()).abs().max() < 5e-5
    model.path = path
    with torch.inference_mode():
        features = model.forward_features(image)[:, 0]
    model.path = "auto"
    assert (features.double() - golden["cls_features"].double()).abs().max() < 5e-5


def test_int8_keeps_the_predictions(model, golden):
    image = golden["images_u8"].permute(0, 3, 1, 2)
    quantised = copy.deepcopy(model)
    report = vitkern.quantise(quantised, image)
    print(f"DeiT-Tiny in int8: {report.agreement:.1%} the same, logits' error {report.error:.2%}")
    with torch.inference_mode():
        got = quantised(image).argmax(1)
    assert report.error < 0.055 and report.agreement >= 15 / 16
    assert (got == golden["labels"]).sum() >= 15
