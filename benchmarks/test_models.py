"""Whole models: the packed engine in turns with the same weights in eager PyTorch and in timm."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from benchmarks.peers import timm_model
from vitkern import ViT

KIND = "model"
MODELS = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
}
BATCHES = (1, 8)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(quick: bool) -> list:
    """(model, batch, precision); quick keeps the first of each."""
    found = [(m, b, p) for m in MODELS for b in BATCHES for p in PRECISIONS]
    return [
        pytest.param(case, id="-".join(map(str, case)))
        for case in found
        if not quick or case == ("Ti/16", 1, "fp32")
    ]


@functools.lru_cache(maxsize=1)
def originals(name: str) -> dict[str, torch.nn.Module]:
    """vitkern's model and timm's (where it can be imported) with the same random weights."""
    torch.manual_seed(0)
    found = {"native": ViT(name).eval()}
    peer = timm_model(MODELS[name])
    if peer is not None:
        peer.load_state_dict(found["native"].state_dict())
        found["timm"] = peer
    return found


def contestants(name: str, precision: str) -> dict[str, torch.nn.Module]:
    """Eager PyTorch at this precision, for bf16 also in fp32 (often faster), timm, and vitkern."""
    dtype = PRECISIONS[precision]
    models = {p: copy.deepcopy(model) for p, model in originals(name).items()}
    eager = {"torch": copy.deepcopy(models["native"]).to(dtype)}
    if precision != "fp32":
        eager["torch_fp32"] = copy.deepcopy(models["native"])
    for model in eager.values():
        model.path = "reference"
    if "timm" in models:
        eager["timm"] = models["timm"].to(dtype)
    models["native"].precision = precision
    return {**eager, "native": models["native"]}


def test_model(case, compare) -> None:
    name, batch, precision = case
    dtype = PRECISIONS[precision]
    models = contestants(name, precision)
    native = models["native"]
    image = torch.randn(batch, 3, 224, 224)
    images = {p: image.to(dtype if p in ("torch", "timm") else torch.float32) for p in models}
    with torch.inference_mode():
        what = native.explain(image)
    if not what.startswith("path: engine"):
        pytest.fail(
            f"the packed engine does not serve this model, so its time means nothing:\n{what}"
        )
    parameters = sum(p.numel() for p in native.parameters())
    multiply_adds = native.summary(show=False).multiply_adds
    compare(
        {p: lambda p=p: models[p](images[p]) for p in models},
        name,
        {"B": batch},
        str(dtype)[6:],
        flops=2 * multiply_adds * batch,
        bytes_moved=dtype.itemsize * parameters + image.element_size() * image.numel(),
    )
