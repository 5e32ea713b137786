"""Small models and pictures for the server's tests."""

import io

import torch

from vitkern import ViT, accelerate, trained_file
from vitkern.image_files import CROP_SHARE, NORMALISATIONS
from vitkern.predictor import Predictor


def picture(seed: int = 0, size: tuple[int, int] = (60, 40), kind: str = "PNG") -> bytes:
    """The file of coloured noise, another for every seed."""
    from PIL import Image

    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.manual_seed(seed))
    file = io.BytesIO()
    Image.frombytes("RGB", size, bytes(pixels.flatten().tolist())).save(file, kind)
    return file.getvalue()


def own_model(precision: str = "fp32") -> Predictor:
    """The model that the package brings: a stem, mean pooling."""
    model, names, crop = trained_file.shipped()
    own = (model.config.mean, model.config.std)
    pixels = own if own[0] else NORMALISATIONS["imagenet"]
    return Predictor(accelerate(model, precision), names, pixels, crop, str(trained_file.SHIPPED))


def with_class_token(**changes) -> Predictor:
    torch.manual_seed(7)
    sizes = {"image_size": 32, "depth": 2, "classes": 3, **changes}
    model = ViT("Ti/16", **sizes).eval()
    if model.config.classes:
        torch.nn.init.normal_(model.head.weight)
    fast = accelerate(model, "fp32")
    names = ["left", "right", "up"][: model.config.classes]
    return Predictor(fast, names, NORMALISATIONS["half"], CROP_SHARE, "some/where/tiny.safetensors")
