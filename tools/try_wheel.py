"""Try an installed vitkern: the extension loads, and a small model runs in it. For cibuildwheel.

    python tools/try_wheel.py

Run it from outside the repository, so that the installed package is tried. Prints the path that ran
and where the extension is; an exception says what is wrong.
"""

import torch

from vitkern import _C, ViT

model = ViT("Ti/16", image_size=32, classes=7).eval()
images = torch.randn(2, 3, 32, 32)
with torch.inference_mode():
    said, logits = model.explain(images), model(images)
    model.path = "reference"
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-4)
assert said.startswith("path: engine"), said
print(said, f"extension: {_C.__file__}", f"instruction sets: {_C.isas()}", sep="\n")
