"""The engine's profile: which step of a forward the time went to."""

import time

import pytest
import torch

from tests.model.tiny_models import BASE
from vitkern import ViT, cpu

STEPS = ("embed", "qkv", "attention", "proj", "mlp", "head")


# Images by each thread alone, and one by all threads together.
@pytest.mark.parametrize("batch", (1, 2, 5))
def test_the_steps_are_the_forward(batch):
    model = ViT(BASE).eval()
    image = torch.randn(batch, 3, 24, 16)
    with torch.inference_mode():
        wanted = model(image)
        start = time.perf_counter()
        found = cpu.profile(lambda: model(image))
        elapsed = time.perf_counter() - start
        assert tuple(found) == STEPS and all(seconds > 0 for seconds in found.values())
        assert sum(found.values()) <= elapsed * torch.get_num_threads()
        assert torch.equal(model(image), wanted)


def test_it_counts_only_what_ran_meanwhile():
    model, image = ViT(BASE).eval(), torch.randn(2, 3, 24, 16)
    with torch.inference_mode():
        model(image)
        assert set(cpu.profile(lambda: None).values()) == {0.0}


def test_it_is_off_again_after_an_error():
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        cpu.profile(fail)
    with torch.inference_mode():
        ViT(BASE).eval()(torch.randn(2, 3, 24, 16))
    assert set(cpu.profile(lambda: None).values()) == {0.0}
