"""Every format that training reads: what comes out, and what is refused."""

import os
import pickle

import numpy as np
import pytest

from tests.train.small_sets import pictures, write_cifar, write_folder, write_idx
from vitkern.train.data import first_of_each_class, open_data, split
from vitkern.train.data.cifar import CIFAR10, unpickle

pytest.importorskip("PIL")


def test_digits_are_scikit_learn_s():
    pytest.importorskip("sklearn")
    train, evaluation = open_data("digits", "")
    assert len(train) + len(evaluation) == 1797 and len(evaluation) == 359
    assert train[0].size == (8, 8) and len(train.classes) == 10
    assert train.pixels.max() == 255


def test_split_holds_out_a_share_of_every_class_and_is_repeatable():
    pytest.importorskip("sklearn")
    whole = open_data("digits", "")[0]
    first, again = (split(whole, 0.25, seed=3) for _ in range(2))
    assert (first.evaluation.pixels == again.evaluation.pixels).all()
    shares = np.bincount(first.evaluation.labels) / np.bincount(whole.labels)
    assert (abs(shares - 0.25) < 0.01).all()
    assert len(first.train) + len(first.evaluation) == len(whole)


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_idx_files_are_read_and_recognised(tmp_path, packed):
    write_idx(tmp_path, 20, 10, packed)
    train, evaluation = open_data("", str(tmp_path))
    pixels, labels = pictures(20, 28, 1, 10)
    assert (train.pixels == pixels).all() and (train.labels == labels).all()
    assert len(evaluation) == 10 and train.classes[9] == "ankle boot"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + b"xx", "asks for 8 bytes, there are 2"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "above"),
        (b"\0\0\x0d\x03" + b"\0" * 12, "not an idx file of bytes"),
        (b"", "not an idx file"),
    ],
    ids=["short", "enormous", "floats", "empty"],
)
def test_a_damaged_idx_file_is_refused(tmp_path, content, words):
    write_idx(tmp_path, 20, 10, packed=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        open_data("fashion-mnist", str(tmp_path))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    write_idx(tmp_path, 20, 10)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="damaged gzip"):
        open_data("fashion-mnist", str(tmp_path))


@pytest.mark.parametrize("form", ["binary", "pickled"])
@pytest.mark.parametrize("inside", ["", "archive"])
def test_both_official_cifar_formats_give_the_same(tmp_path, form, inside):
    pixels, labels = pictures(60, 32, 3, 10)
    folders = {"binary": "cifar-10-batches-bin", "pickled": "cifar-10-batches-py"}
    write_cifar(tmp_path / (folders[form] if inside else ""), form, pixels, labels, test=10)
    train, evaluation = open_data("", str(tmp_path))
    assert train.classes == CIFAR10
    assert (train.pixels == pixels[:50]).all() and (train.labels == labels[:50]).all()
    assert (evaluation.pixels == pixels[50:]).all()


def test_cifar100_reads_fine_labels(tmp_path):
    pixels, _ = pictures(6, 32, 3, 2)
    from tests.train.small_sets import rows_of

    for name in ("train", "test"):
        labels = np.array([[19, 99]] * 6, np.uint8)
        records = np.concatenate([labels, rows_of(pixels)], 1)
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    names = "\n".join(f"thing {i}" for i in range(100))
    (tmp_path / "fine_label_names.txt").write_text(names)
    train, _ = open_data("cifar100", str(tmp_path))
    assert (train.labels == 99).all() and train.classes[99] == "thing 99"


class Malice:
    def __reduce__(self):
        return os.system, ("touch was_executed",)


@pytest.mark.parametrize(
    "content, words",
    [
        (pickle.dumps(Malice()), "system"),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}), "f8"),
        (pickle.dumps([1, 2]), "not a dict"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}, 2)[:-400], "pickle"),
        (b"", "pickle"),
    ],
    ids=["code", "floats", "list", "cut short", "empty"],
)
def test_a_pickle_that_is_not_cifar_s_is_refused(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        unpickle(path)
    assert not (tmp_path / "was_executed").exists()


def test_a_real_pickle_of_python_2_is_read(tmp_path):
    """As the official archive has it: texts are Python 2's strings, and arrays of protocol 2."""
    data = np.arange(3072, dtype=np.uint8)[None]
    raw = pickle.dumps({"data": data, "labels": [3]}, protocol=2)
    path = tmp_path / "batch"
    path.write_bytes(raw)
    found = unpickle(path)
    assert (found[b"data"] == data).all() and found[b"labels"] == [3]


def test_folders_are_classes(tmp_path):
    write_folder(tmp_path / "train", 4)
    write_folder(tmp_path / "val", 2)
    train, evaluation = open_data("", str(tmp_path))
    assert train.classes == ("class_0", "class_1", "class_2")
    assert len(train) == 12 and len(evaluation) == 6 and train[0].size == (24, 24)
    (tmp_path / "val" / "class_9").mkdir()
    (tmp_path / "val" / "class_0" / "0.png").rename(tmp_path / "val" / "class_9" / "0.png")
    with pytest.raises(ValueError, match="class_9"):
        open_data("folder", str(tmp_path))


def test_limit_takes_the_first_of_each_class(tmp_path):
    write_idx(tmp_path, 50, 10)
    train, _ = open_data("fashion-mnist", str(tmp_path))
    few = first_of_each_class(train, 20)
    assert np.bincount(few.labels).tolist() == [2] * 10


@pytest.mark.parametrize(
    "kind, words", [("", "neither"), ("cifar10", "test_batch"), ("fashion-mnist", "train-images")]
)
def test_an_empty_folder_says_what_is_missing(tmp_path, kind, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_data(kind, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_data(kind, str(tmp_path / "absent"))
