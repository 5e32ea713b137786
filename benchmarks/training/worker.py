"""One contestant in a process of its own: python -m benchmarks.training.worker JSON

Each line {"do": "step"} on standard input makes a training step (forward, backward, AdamW); the
answer is a line of JSON with its seconds and its loss. "memory" answers with the process's highest
resident set, and what it was before the model was made.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

from vitkern import ViT
from vitkern.bench.timm_import import prepare
from vitkern.measure.memory import resident, settle

LEARNING_RATE = 1e-4


def model_of(contestant: str, name: str) -> nn.Module:
    """The same weights for each: those of vitkern's model by the seed, with timm's names."""
    torch.manual_seed(0)
    ours = ViT(name)
    if contestant == "vitkern":
        return ours.train()
    prepare()
    import timm

    theirs = timm.create_model(name)
    theirs.load_state_dict(ours.state_dict())
    theirs.train()
    if contestant != "compile":
        return theirs
    compiled = torch.compile(theirs)
    assert isinstance(compiled, nn.Module)
    return compiled


class Steps:
    """Steps of one contestant on the same random images, as often as they are asked for."""

    def __init__(self, contestant: str, name: str, batch: int, precision: str) -> None:
        self.before = settle()
        self.model = model_of(contestant, name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.autocast = precision == "bf16"
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(batch, 3, 224, 224, generator=generator)
        self.labels = torch.randint(0, 1000, (batch,), generator=generator)

    def step(self) -> float:
        """The loss before the step."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.model(self.images)
        loss = nn.functional.cross_entropy(logits.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(given["threads"])
    steps = Steps(given["contestant"], given["model"], given["batch"], given["precision"])
    for line in sys.stdin:
        answer: dict[str, float]
        if json.loads(line)["do"] == "memory":
            answer = {"peak": resident("VmHWM"), "before": steps.before}
        else:
            begin = time.perf_counter()
            loss = steps.step()
            answer = {"seconds": time.perf_counter() - begin, "loss": loss}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
