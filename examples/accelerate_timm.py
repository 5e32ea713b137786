"""Accelerate a timm model that exists, and compare the two.

    python examples/accelerate_timm.py
    python examples/accelerate_timm.py --model vit_base_patch16_224 --precision bf16

Prints which path runs and why, the largest difference of the logits, and the median milliseconds of
a forward for timm and for vitkern, timed in turns. Needs timm, which `--pretrained` lets download
its weights.
"""

import argparse

import timm
import torch

import vitkern
from vitkern.measure.timing import Turns

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", default="vit_tiny_patch16_224", metavar="NAME", help="timm's name")
parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
parser.add_argument("--batch", type=int, default=1, metavar="B")
parser.add_argument("--seconds", type=float, default=2.0, help="of timing (default 2)")
parser.add_argument("--pretrained", action="store_true")
given = parser.parse_args()

model = timm.create_model(given.model, pretrained=given.pretrained).eval()
fast = vitkern.accelerate(model, precision=given.precision)  # shares the parameters
image = torch.randn(given.batch, 3, *model.patch_embed.img_size)

with torch.inference_mode():
    print(fast.explain(image))
    miss = (fast(image) - model(image)).abs().max().item()
    print(f"largest difference of the logits: {miss:.1e}")
    turns = Turns({"timm": lambda: model(image), "vitkern": lambda: fast(image)})
    for name, spread in turns.run(given.seconds).items():
        print(f"{name:<8} {spread.median / 1e3:8.2f} ms")
