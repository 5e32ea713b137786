"""Order, augmentation and loading: the same for the same seed, whoever computes them."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.train.small_sets import pictures, write_folder
from vitkern.train import augment
from vitkern.train.batches import Draw, EvaluationOrder, Order, Problems, Views, collate, loader
from vitkern.train.data import Images, open_data
from vitkern.train.settings import Data

Image = pytest.importorskip("PIL.Image")

STRONG = Data(
    crop="resized", flip=0.5, rotation=15.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1,
    mixup=0.2, cutmix=1.0,
)  # fmt: skip


def images(count: int = 24) -> Images:
    pixels, labels = pictures(count, 16, 3, 3)
    return Images(("a", "b", "c"), labels, pixels)


def order(data: Data = STRONG, **changes) -> Order:
    given = {"count": 24, "batch": 8, "size": (16, 16), "data": data, "seed": 5}
    given |= {"start": 0, "stop": 6} | changes
    return Order(**given)


def all_of(batches) -> list[torch.Tensor]:
    return [part for batch in batches for part in batch[:4]]


def test_workers_give_what_the_main_process_gives():
    views = Views(images(), (16, 16), 3, STRONG, 5)
    alone, shared = (all_of(loader(views, order(), workers)) for workers in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_a_run_can_start_at_any_step():
    assert list(order())[4:] == list(order(start=4))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_a_batch(world):
    whole = list(order())
    shares = [list(order(rank=rank, world=world)) for rank in range(world)]
    for i, draws in enumerate(whole):
        assert sorted(d for share in shares for d in share[i]) == sorted(draws)


def test_accumulation_sees_the_same_images():
    parts = list(order(accumulate=2))
    joined = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert [sorted(draws) for draws in joined] == [sorted(draws) for draws in order()]


def test_an_epoch_sees_every_image_once_in_a_new_order():
    plain = list(order(Data()))
    epochs = [[d.image for draws in plain[i : i + 3] for d in draws] for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24)) and epochs[0] != epochs[1]


def test_evaluation_sees_every_image_once():
    for world in (1, 2, 3):
        shares = [EvaluationOrder(25, 4, rank, world) for rank in range(world)]
        assert len({len(list(share)) for share in shares}) == 1
        assert all(0 < len(draws) <= 4 for share in shares for draws in share)
        seen = [draw.image for share in shares for draws in share for draw in draws]
        assert sorted(seen) == list(range(25))
    with pytest.raises(ValueError, match="too few"):
        EvaluationOrder(1, 4, 0, 2)


def test_epochs_augment_differently_and_seeds_repeat():
    views = Views(images(), (16, 16), 3, STRONG, 5)
    first, again, other = (views[Draw(epoch, 3)][0] for epoch in (0, 0, 1))
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_views_have_the_model_s_shape(crop, channels):
    data = dataclasses.replace(STRONG, crop=crop)
    image = Image.effect_noise((50, 31), 80)
    rng = np.random.default_rng(0)
    view = augment.random_view(image, (16, 24), channels, data, rng)
    assert view.shape == (channels, 16, 24) and view.dtype == np.uint8
    assert augment.plain_view(image, (16, 24), channels, 0.875).shape == (channels, 16, 24)


def test_an_image_of_the_model_s_size_passes_unchanged():
    pixels, _ = pictures(1, 16, 3, 3)
    image, rng = Image.fromarray(pixels[0]), np.random.default_rng(0)
    for view in (
        augment.plain_view(image, (16, 16), 3, 1.0),
        augment.random_view(image, (16, 16), 3, Data(), rng),
    ):
        assert (view == pixels[0].transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    "change", ["flip", "rotation", "brightness", "contrast", "saturation", "hue"]
)
def test_each_augmentation_changes_pixels(change):
    value = 1.0 if change == "flip" else 90.0 if change == "rotation" else 0.5
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
    data = dataclasses.replace(Data(), **{change: value})
    view = augment.random_view(Image.fromarray(pixels), (16, 16), 3, data, rng)
    assert (view != pixels.transpose(2, 0, 1)).mean() > 0.2
    if change == "flip":
        assert (view == pixels.transpose(2, 0, 1)[:, :, ::-1]).all()


def test_mixup_blends_and_cutmix_pastes_by_their_shares():
    one, other = np.zeros((3, 8, 8), np.uint8), np.full((3, 8, 8), 200, np.uint8)
    assert (augment.mixed(one, other, 0.75, None) == 50).all()
    pasted = augment.mixed(one, other, 0.5, (0, 0, 4, 8))
    assert (pasted[:, :4] == 200).all() and not pasted[:, 4:].any()
    for draws in order(Data(cutmix=1.0)):
        for draw in draws:
            top, left, bottom, right = draw.box
            assert draw.share == pytest.approx(1 - (bottom - top) * (right - left) / 256)


def test_a_broken_image_is_skipped_and_reported_once_or_fatal(tmp_path, capsys):
    write_folder(tmp_path, 3)
    (tmp_path / "class_0" / "bad.png").write_bytes(b"\x89PNG no")
    found, _ = open_data("folder", str(tmp_path), eval_share=0.3)
    views = Views(found, (16, 16), 3, Data(), 0)
    (bad,) = [i for i, path in enumerate(found.files) if path.name == "bad.png"]
    batch = collate([views[Draw(0, i)] for i in (bad, *range(bad), bad)])
    assert len(batch.images) == bad
    report = Problems(fatal=False)
    report(batch)
    assert capsys.readouterr().err.count("bad.png") == 1
    with pytest.raises(ValueError, match=r"bad\.png"):
        Problems(fatal=True)(batch)
    with pytest.raises(ValueError, match="every image of a batch is broken"):
        report(collate([views[Draw(0, bad)]]))
