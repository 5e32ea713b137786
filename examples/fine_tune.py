"""Fine-tune a model on a few classes, then serve it with the packed engine.

    python examples/fine_tune.py
    python examples/fine_tune.py --weights deit_tiny.safetensors --model Ti/16 --image-size 224

The data is made here: stripes across, stripes down and a checkerboard, in noise. Replace `batch()`
with your own loader. Prints the loss every few steps, which falls from log(3) = 1.10, and the share
of new images that the trained model names rightly.
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F

from vitkern import ViT
from vitkern.weights import timm

CLASSES = ("stripes across", "stripes down", "checkerboard")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", default="Ti/16", metavar="NAME")
parser.add_argument("--image-size", type=int, default=64, metavar="PIXELS")
parser.add_argument("--weights", type=pathlib.Path, metavar="FILE", help=".safetensors or .pt")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=24, metavar="B")
given = parser.parse_args()


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, Y, X) and the class of each."""
    labels = torch.randint(len(CLASSES), (count,))
    wave = torch.where(torch.arange(given.image_size) // 8 % 2 == 0, 1.0, -1.0)
    across, down = wave[:, None].expand(-1, len(wave)), wave[None].expand(len(wave), -1)
    patterns = torch.stack([across, down, across * down])  # (3, Y, X)
    images = patterns[labels][:, None].expand(-1, 3, -1, -1)
    return images + torch.randn(images.shape), labels


torch.manual_seed(0)
model = ViT(given.model, image_size=given.image_size, drop_path=0.05)
if given.weights:
    timm.load(model, given.weights, resize_positions=True)
model.reset_classifier(len(CLASSES))  # a new head of zeros, as the ViT paper fine-tunes

# As timm does: no weight decay on positions, tokens, norms and biases.
plain = model.no_weight_decay()
kept = [p for n, p in model.named_parameters() if n in plain or p.ndim < 2]
decayed = [p for n, p in model.named_parameters() if not (n in plain or p.ndim < 2)]
groups = [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-4)

model.train()
for step in range(given.steps):
    images, labels = batch(given.batch)
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % max(1, given.steps // 6) == 0 or step == given.steps - 1:
        print(f"step {step:>3}  loss {loss.item():.3f}")

model.eval()
images, labels = batch(64)
with torch.inference_mode():  # the engine packs the trained weights at this call
    right = (model(images).argmax(-1) == labels).float().mean().item()
    print(model.explain(images).splitlines()[0])
print(f"right on new images: {right:.0%}")
