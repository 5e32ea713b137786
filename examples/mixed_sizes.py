"""Run images of different sizes in one call, without resizing, cropping or padding them.

    python examples/mixed_sizes.py
    python examples/mixed_sizes.py --model B/16 --precision bf16 --seconds 20

Prints the images' sizes and tokens, whether each has the logits of a call of its own, and the time
per token: of all in one call, one by one, padded to the largest size (whose logits are others: the
model sees the padding), and of a batch of one size with about as many tokens. The calls take turns.
"""

import argparse
import math
import statistics
import time

import torch

from vitkern import ViT

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", default="Ti/16", metavar="NAME")
parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"))
parser.add_argument("--scale", type=float, default=1.0, help="of the images' sides, 160 to 320")
parser.add_argument("--seconds", type=float, default=2.0)
given = parser.parse_args()

torch.manual_seed(0)
model = ViT(given.model, dynamic_image_size=True).eval()  # positions are interpolated for each size
model.precision = given.precision
patch = model.config.patch_size


def pixels(side: float) -> int:
    """A side as a multiple of the patch."""
    return max(1, round(given.scale * side / patch)) * patch


heights = (160, 320, 192, 224, 256, 208, 176, 240)
widths = (224, 256, 192, 320, 160, 272, 240, 208)
images = [torch.randn(3, pixels(y), pixels(x)) for y, x in zip(heights, widths, strict=True)]
with torch.inference_mode():
    logits = model.forward_packed(images)  # (8, classes)
    rows = model.forward_packed(images, features=True)  # 8 times (S, D): S is each image's own
    alone = torch.cat([model(image[None]) for image in images])
for image, tokens in zip(images, rows, strict=True):
    print(f"{image.shape[1]} x {image.shape[2]} pixels, {tokens.shape[0]} tokens")
print(f"each image has the logits of a call of its own: {torch.equal(logits, alone)}")

tokens = sum(len(one) for one in rows)
largest = [max(image.shape[axis] for image in images) for axis in (1, 2)]
padded = torch.zeros(len(images), 3, *largest)
for place, image in zip(padded, images, strict=True):
    place[:, : image.shape[1], : image.shape[2]] = image
side = pixels(math.sqrt(tokens / len(images)) * patch / given.scale)
uniform = torch.randn(len(images), 3, side, side)

calls = {
    "in one call": (lambda: model.forward_packed(images), tokens),
    "one by one": (lambda: [model(image[None]) for image in images], tokens),
    "padded": (lambda: model(padded), tokens),
    f"a batch at {side} pixels": (lambda: model(uniform), len(images) * ((side // patch) ** 2 + 1)),
}
times: dict[str, list[float]] = {name: [] for name in calls}
end = time.perf_counter() + given.seconds
with torch.inference_mode():
    while not min(map(len, times.values())) or time.perf_counter() < end:
        for name, (call, count) in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) / count)
for name, taken in times.items():
    print(f"{name:22} {1e6 * statistics.median(taken):8.1f} us per token")
