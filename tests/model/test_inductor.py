"""torch.compile as users call it: Inductor's code around the operators, in training."""

import copy
import os
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.model.tiny_models import BASE, OPTIONS
from vitkern import ViT
from vitkern.verification.models import joint_error

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # Inductor's
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"Inductor needs a compiler: {COMPILER}"),
]
IMAGES = torch.randn(8, 3, *BASE.image_size, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) * 4


def gradients(run, parameters, images):
    """By name, of one backward through `run`."""
    loss = F.cross_entropy(run(images), LABELS)
    found = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def of_the_reference(model, dtype):
    """The same of a copy, module by module in plain PyTorch."""
    plain = copy.deepcopy(model).to(dtype)
    plain.path = "reference"
    return gradients(plain, dict(plain.named_parameters()), IMAGES.to(dtype))


@pytest.mark.parametrize("option", ["plain", "swiglu"])
def test_inductor_s_gradients_keep_the_contract_over_two_steps(option):
    """Compiled once, with weights that an optimizer changes between the two backwards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = ViT(BASE.replace(**OPTIONS[option])).train()
    parameters = dict(model.named_parameters())
    run = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for step in range(2):
        truth = of_the_reference(model, torch.float64)
        with FixedOrder():
            torchs = joint_error(of_the_reference(model, torch.float32), truth)
        found = gradients(run, parameters, IMAGES)
        ours = joint_error(found, truth)
        assert ours.within(torchs, torch.float32), f"step {step}: {ours} against PyTorch's {torchs}"
        for name, parameter in parameters.items():
            parameter.grad = found[name]
        optimizer.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1, "the second step ran the first one's graph"
    moved = [name for name, p in parameters.items() if (p - before[name]).abs().max() > 1e-3]
    assert len(moved) > 0.9 * len(parameters), "the two backwards had different weights"
