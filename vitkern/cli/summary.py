"""Print a model's layers, shapes, parameters and multiply-adds.

No weights are made: the largest models answer at once.

Examples:
    vitkern summary B/16
    vitkern summary vit_large_patch14_dinov2 --image-size 224
    vitkern summary Ti/16 --image-size 32 --classes 10 --json
"""

from __future__ import annotations

import argparse
import json


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help='a variant such as "B/16", or timm\'s "vit_base_patch16_224"'
    )
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="side of the square image")
    parser.add_argument(
        "--classes", type=int, metavar="N", help="rows of the classifier; 0 for none"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(given: argparse.Namespace) -> int:
    from .. import ViT

    changes = {"image_size": given.image_size, "classes": given.classes}
    changes = {name: value for name, value in changes.items() if value is not None}
    model = ViT(given.name, device="meta", **changes)  # shapes alone: no memory for weights
    found = model.summary(show=not given.json)
    if given.json:
        sums = {"parameters": found.parameters, "multiply_adds": found.multiply_adds}
        print(json.dumps({**sums, "rows": [row._asdict() for row in found.rows]}, indent=1))
    return 0
