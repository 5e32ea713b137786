"""Turn images into embeddings, and find the most similar ones.

    python examples/extract_features.py
    python examples/extract_features.py --weights deit_tiny.safetensors cat.jpg dog.jpg car.jpg

Prints the shapes of the embeddings (one vector an image), of the tokens (one vector a patch, as
detection and segmentation want them) and of an intermediate block's map, then each image's nearest
neighbour by cosine. Without images it makes pairs of noise, whose halves are each other's nearest;
without weights the model is random.
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F

from vitkern import ViT, image_files
from vitkern.weights import timm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("images", nargs="*", type=pathlib.Path, metavar="IMAGE")
parser.add_argument("--model", default="Ti/16", metavar="NAME")
parser.add_argument("--image-size", type=int, default=224, metavar="PIXELS")
parser.add_argument("--weights", type=pathlib.Path, metavar="FILE", help=".safetensors or .pt")
given = parser.parse_args()

torch.manual_seed(0)
model = ViT(given.model, image_size=given.image_size, classes=0).eval()  # no head: pooled features
if given.weights:
    state = {k: v for k, v in timm.read(given.weights).items() if not k.startswith("head.")}
    timm.load(model, state, resize_positions=True)

side = given.image_size
if given.images:
    names = [path.name for path in given.images]
    images = [image_files.prepare(image_files.read(path), (side, side)) for path in given.images]
    batch = torch.stack(images)
else:
    names = ["a", "a, noisy", "b", "b, noisy"]
    plain = torch.randn(2, 3, side, side).repeat_interleave(2, 0)
    batch = plain + 0.1 * torch.randn_like(plain)

with torch.inference_mode():
    embeddings = model(batch)  # (B, D)
    tokens = model.forward_features(batch)  # (B, S, D): class token, then patches row by row
    (feature_map,) = model.forward_intermediates(batch, [-2], intermediates_only=True)  # (B,D,y,x)
print(f"embeddings {tuple(embeddings.shape)}, tokens {tuple(tokens.shape)}")
print(f"map of the last block but one {tuple(feature_map.shape)}")

unit = F.normalize(embeddings, dim=-1)
similarity = unit @ unit.mT
similarity.fill_diagonal_(-1)
if len(names) > 1:
    for name, row in zip(names, similarity, strict=True):
        print(f"nearest to {name}: {names[row.argmax()]} (cosine {row.max():.3f})")
