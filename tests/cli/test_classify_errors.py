"""`vitkern classify` with files that lie: one line on stderr each, and memory for none of it."""

import io
import json
import pathlib
import struct
import zipfile
import zlib

import pytest
import torch

from vitkern import ViT, image_files
from vitkern.__main__ import main
from vitkern.weights import timm

PIL = pytest.importorskip("PIL.Image", reason="classify reads images with Pillow")


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of `vitkern classify`."""
    status = main(["classify", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return ViT("Ti/16", image_size=32, classes=7).state_dict()


@pytest.fixture(scope="module")
def good(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "good.pt"
    torch.save(state, path)
    return path


# ---- weights -----------------------------------------------------------------------


WRONG_STATES = {
    "0-d head": ({"head.weight": torch.tensor(1.0)}, "unexpected (2): head.weight"),
    "1-d head": ({"head.weight": torch.zeros(192)}, "unexpected (2): head.weight"),
    "endless head": ({"head.weight": torch.zeros(2**40, 0)}, "classes must be at most"),
    "thin positions": ({"pos_embed": torch.zeros(1, 17, 0)}, "pos_embed has shape (1, 17, 0)"),
    "narrow head": (
        {"head.weight": torch.zeros(7, 5)},
        "has shape (7, 5), head.weight needs (7, 192)",
    ),
    "0-d positions": ({"pos_embed": torch.tensor(1.0)}, "unexpected (1): pos_embed"),
    "1-d positions": ({"pos_embed": torch.zeros(5)}, "unexpected (1): pos_embed"),
    "no positions": ({"pos_embed": torch.zeros(1, 0, 192)}, "0 positions are no square grid"),
    "four positions": ({"pos_embed": torch.zeros(1, 4, 7)}, "pos_embed has shape (1, 4, 7)"),
    "endless positions": ({"pos_embed": torch.zeros(1, 2**40 + 1, 0)}, "must be at most 65536"),
    "2-d patches": ({"patch_embed.proj.weight": torch.zeros(192, 9)}, "has shape (192, 9)"),
    "odd patches": ({"patch_embed.proj.weight": torch.zeros(192, 3, 9, 7)}, "has shape (192, 3, 9"),
    "a number as a key": ({3: torch.zeros(1)}, "key 3 is no name"),
    "a tuple as a key": ({(): torch.zeros(1)}, "key () is no name"),
    "no key": ({None: torch.zeros(1)}, "key None is no name"),
    "text": ({"norm.bias": "text"}, "'norm.bias' is no tensor"),
    "integers": ({"norm.bias": torch.zeros(192, dtype=torch.int64)}, "norm.bias is int64"),
    "complex": ({"norm.bias": torch.zeros(192, dtype=torch.cfloat)}, "norm.bias is complex64"),
    "sparse": ({"norm.bias": torch.ones(192).to_sparse()}, "'norm.bias' is a sparse"),
    "meta": ({"norm.bias": torch.ones(192, device="meta")}, "'norm.bias' is a sparse"),
    "too few": ({"norm.bias": torch.zeros(5)}, "norm.bias has shape (5,)"),
    "too many": ({"surprise": torch.zeros(5)}, "unexpected (1): surprise"),
    "stride 0": ({"head.weight": torch.zeros(1, 1).expand(20_000_000, 192)}, "tensors ask for"),
    "repeated": (
        {f"blocks.0.{i}": torch.zeros(3 << 20)[i:].expand(9, -1) for i in range(4)},
        "tensors ask for",
    ),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_weights_of_wrong_shapes_are_refused(capsys, photo, state, tmp_path, case):
    changes, said = WRONG_STATES[case]
    path = tmp_path / "wrong.pt"
    torch.save({**state, **changes}, path)
    status, out, err = run(capsys, photo, "--weights", path)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert said in err and "wrong.pt" in err


def write_safetensors(path, tensors, size):
    """A header with these shapes of fp32, and a file of this size without a byte on the disk."""
    at, header = 0, {}
    for name, shape in tensors.items():
        bytes_ = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + bytes_]}
        at += bytes_
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + (at if size is None else size))


@pytest.mark.parametrize(
    "shape, size, said",
    [
        (
            [65_000_000, 192],
            None,
            ("fit into memory", "no layout that is known"),
        ),  # 50 GB that are there
        ([65_000_000, 192], 1000, ("damaged or not safetensors",)),  # and that are not
        ([2**62, 192], 1000, ("damaged or not safetensors",)),
        ([2**40, 0], None, ("no layout that is known",)),
    ],
)
def test_enormous_safetensors_are_refused(capsys, photo, tmp_path, shape, size, said):
    pytest.importorskip("safetensors")
    path = tmp_path / "huge.safetensors"
    write_safetensors(path, {"head.weight": shape}, size)
    status, _, err = run(capsys, photo, "--weights", path)
    assert status == 2 and err.count("\n") == 1
    assert "huge.safetensors" in err and any(text in err for text in said)


def test_compressed_checkpoints_are_refused(good, tmp_path):
    """A thousandth of what it would unfold to."""
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as copy:
        for name in source.namelist():
            copy.writestr(name, bytes(len(source.read(name))) if "/data/" in name else b"")
    with pytest.raises(ValueError, match=r"bomb.pt is damaged .* is compressed"):
        timm.read(path)


def test_checkpoints_of_the_older_format_are_read(state, tmp_path):
    torch.save({"norm.bias": state["norm.bias"]}, tmp_path / "old.pt",
               _use_new_zipfile_serialization=False)  # fmt: skip
    assert torch.equal(timm.read(tmp_path / "old.pt")["norm.bias"], state["norm.bias"])


def test_tensors_with_two_names_are_read(tmp_path):
    twice = torch.randn(100, 100)
    torch.save({"a": twice, "b": twice}, tmp_path / "tied.pt")
    assert torch.equal(timm.read(tmp_path / "tied.pt")["b"], twice)


@pytest.mark.parametrize("place", [0.001, 0.3, 0.9, 0.999])
def test_damaged_checkpoints_are_refused_or_read(capsys, photo, good, tmp_path, place):
    """Whatever bytes are overwritten: an answer, or one line that says what is wrong."""
    content = bytearray(good.read_bytes())
    at = int(place * len(content))
    content[at : at + 64] = bytes(range(64))
    path = tmp_path / "scratched.pt"
    path.write_bytes(content)
    status, _, err = run(capsys, photo, "--weights", path)
    assert (status, err) == (0, "") or (status == 2 and err.count("\n") == 1)


def test_positions_of_wrong_shapes_are_refused_by_load(state):
    model = ViT("Ti/16", image_size=48, classes=7)
    for shape in ((), (5,), (1, 0, 192), (1, 1, 192), (2, 5, 192), (1, 5, 7), (1, 2**40, 0)):
        with pytest.raises(ValueError, match=r"pos_embed has shape .*expected \(1, 1 \+ positions"):
            timm.load(model, {**state, "pos_embed": torch.zeros(shape)}, resize_positions=True)
    with pytest.raises(ValueError, match=r"head.weight has shape \(\), expected \(classes, width"):
        timm.load(model, {**state, "head.weight": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"timm.load: its key 3 is no name of a parameter"):
        timm.load(model, {**state, 3: torch.zeros(1)})


# ---- class names -------------------------------------------------------------------


NAMES = {
    "deep": "[" * 100_000,
    "numbers": "[0, 1, 2, 3, 4, 5, 6]",
    "nothing": json.dumps([None] * 7),
    "empty lists": json.dumps([[]] * 7),
    "twice the same": json.dumps({"0": "a", "00": "b", **{str(i): "c" for i in range(2, 7)}}),
    "negative": json.dumps({str(i - 1): "a" for i in range(7)}),
    "beyond": json.dumps({str(i + 1): "a" for i in range(7)}),
    "half a character": json.dumps(["\ud800"] * 7),
    "no text": b"\xff\xfe",
    "nested": json.dumps([[["a"]]] * 7),
}


@pytest.mark.parametrize("case", NAMES)
def test_class_names_that_are_none_are_refused(capsys, photo, good, tmp_path, case):
    path, text = tmp_path / "names.json", NAMES[case]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, out, err = run(capsys, photo, "--weights", good, "--classes", path)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "names.json" in err


def test_class_names_without_end_are_refused_unread(capsys, photo, good, tmp_path):
    path = tmp_path / "names.json"
    with open(path, "wb") as file:
        file.truncate(1 << 36)
    status, _, err = run(capsys, photo, "--weights", good, "--classes", path)
    assert status == 2 and "68719476736 bytes are too many" in err


# ---- images ------------------------------------------------------------------------


FORMATS = ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP", "ICO"]


def encoded(kind) -> bytes:
    file = io.BytesIO()
    try:
        PIL.effect_noise((64, 48), 80).convert("RGB").save(file, kind)
    except (OSError, KeyError, ImportError):
        pytest.skip(f"this Pillow writes no {kind}")
    return file.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_images_are_one_line_each(capsys, good, tmp_path, kind):
    content, paths = encoded(kind), []
    for i in range(12):  # cut off, or overwritten somewhere
        wrong, at = bytearray(content), len(content) * i // 12
        wrong = wrong[:at] if i % 2 else wrong[:at] + bytes([255]) * 8 + wrong[at + 8 :]
        paths.append(tmp_path / f"{i}.{kind.lower()}")
        paths[-1].write_bytes(wrong)
    status, out, err = run(capsys, *paths, "--weights", good, "--json")
    answers = json.loads(out)
    assert [answer["image"] for answer in answers] == [str(path) for path in paths]
    assert status in (0, 1) and "Traceback" not in err
    for answer in answers:
        if "error" in answer:
            assert pathlib.Path(answer["image"]).name in answer["error"]


def test_decoders_may_raise_anything(capsys, good, photo, monkeypatch):
    for error in (RuntimeError("bad\nAVIF"), MemoryError(), KeyError("x"), ZeroDivisionError()):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(PIL.Image, "convert", fail)
        status, _, err = run(capsys, photo, "--weights", good)
        assert status == 1 and err.count("\n") == 1
        assert "photo.png: broken image (" in err


@pytest.mark.parametrize("size", [(20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused(capsys, good, tmp_path, size):
    """The header of an enormous image, on a file of a few bytes."""
    content = bytearray(encoded("PNG"))
    content[16:24] = struct.pack(">II", *size)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    path = tmp_path / "bomb.png"
    path.write_bytes(content)
    status, _, err = run(capsys, path, "--weights", good)
    assert status == 1 and err.count("\n") == 1
    assert "too many" in err and "scale it down" in err


def test_formats_that_start_other_programs_are_not_opened(tmp_path):
    """Pillow hands EPS to Ghostscript."""
    path = tmp_path / "picture.jpg"
    PIL.new("RGB", (8, 8)).save(path, "EPS")
    with pytest.raises(ValueError, match="not an image that Pillow can read"):
        image_files.read(path)
