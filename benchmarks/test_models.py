"""Whole models: the packed engine in turns with the same weights in eager PyTorch and in timm."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from benchmarks import models
from benchmarks.machine import precisions
from benchmarks.peers import timm_model
from vitkern import ViT
from vitkern.precision import PRECISIONS

KIND = "model"
MODELS = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
}
BATCHES = (1, 8)
IMAGE_SIZE = 224


def cases(quick: bool) -> list:
    """(model, batch, precision); quick keeps the first of each."""
    found = [(m, b, p) for m in MODELS for b in BATCHES for p in precisions()]
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


def test_model(case, compare) -> None:
    name, batch, precision = case
    found = dict(originals(name))
    model = found.pop("native")
    peers = {p: copy.deepcopy(peer).to(PRECISIONS[precision].dtype) for p, peer in found.items()}
    competing = {**peers, **models.contestants(model, precision)}
    image = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    models.require_engine(competing["native"], image)
    compare(
        models.calls(competing, image, precision),
        name,
        {"B": batch},
        str(PRECISIONS[precision].dtype)[6:],
        precision=precision,
        flops=models.flops(model, batch, IMAGE_SIZE),
        native_flops=models.engine_flops(model, batch, IMAGE_SIZE),
        bytes_moved=models.bytes_moved(model, image, precision),
    )
