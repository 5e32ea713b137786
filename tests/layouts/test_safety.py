"""Files from strangers: an error each, never a crash, a hang, or code that runs; memory bounded."""

import io
import json
import pickle
import resource
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch

import vitkern
from tests.layouts import originals
from tests.model.tiny_models import tiny
from vitkern.weights import npz

safetensors = pytest.importorskip("safetensors.torch")
save_file, load_file = safetensors.save_file, safetensors.load_file


class Surprise:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def state():
    return tiny(image_size=16).state_dict()


@pytest.fixture
def arrays(tmp_path):
    path = originals.WRITERS["jax"](originals.MODELS["jax"](), tmp_path)
    return dict(np.load(path))


def refused(path, match, **options):
    with pytest.raises((ValueError, OSError), match=match) as error:
        vitkern.load(path, **options)
    return str(error.value)


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def member(name, content, size=None):
    """An archive with one member, whose size may be a lie."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    whole = bytearray(file.getvalue())
    if size is not None:  # in the local header and in the directory
        for mark, place in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
            at = whole.index(mark) + place
            whole[at : at + 4] = struct.pack("<I", size)
    return bytes(whole)


def header(shape, descr="<f4"):
    about = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    text = about.encode().ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def test_pickles_do_not_run(state, tmp_path):
    made = tmp_path / "made"
    for name, content in (
        ("a.pt", {"head.weight": Surprise(made)}),
        ("b.pt", Surprise(made)),
    ):
        torch.save(content, tmp_path / name)
        refused(tmp_path / name, "can run code")
    (tmp_path / "c.bin").write_bytes(pickle.dumps(Surprise(made)))
    refused(tmp_path / "c.bin", "can run code|damaged")
    (tmp_path / "d.npz").write_bytes(pickle.dumps(Surprise(made)))
    refused(tmp_path / "d.npz", "no .npz of arrays")
    objects = np.array([Surprise(made)], dtype=object)
    np.savez(tmp_path / "e.npz", **{"embedding/kernel": objects})
    refused(tmp_path / "e.npz", "holds Python objects")
    assert not made.exists()


def test_zip_bombs_are_refused_before_they_unfold(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "ROOM", 16 << 20)  # small bombs are made quickly
    before = peak_mib()
    zeros = header((1 << 28,)) + bytes(1 << 20)
    bomb = tmp_path / "bomb.npz"
    bomb.write_bytes(member("a.npy", zeros, size=(1 << 30) + 128))
    refused(bomb, "would decompress to 1073741952")
    many = tmp_path / "many.npz"
    with zipfile.ZipFile(many, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(40):
            archive.writestr(f"{i}.npy", bytes(1 << 20))
    refused(many, "would decompress to")
    lie = tmp_path / "lie.npz"  # claims little, holds much
    lie.write_bytes(member("a.npy", header((4,)) + bytes(8 << 20), size=144))
    refused(lie, "damaged")
    claim = tmp_path / "claim.npz"  # its array claims much, its member little
    claim.write_bytes(member("a.npy", header((1 << 40,)) + bytes(64)))
    refused(claim, "beyond its bytes")
    assert peak_mib() - before < 200


def test_torch_bombs_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/data/0", bytes(8 << 20))
    refused(path, "compressed")
    torch.save({"patch_embed.proj.weight": torch.zeros(1).expand(1 << 40)}, tmp_path / "b.pt")
    refused(tmp_path / "b.pt", "its tensors ask for")
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(scripted, tmp_path / "c.pt")
    refused(tmp_path / "c.pt", "TorchScript archive|compressed")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "damaged"),
        (member("a.txt", b"hello"), "is no array"),
        (member("a.npy", b"hello"), "damaged"),
        (member("a.npy", header((-1,))), "beyond its bytes"),
        (member("a.npy", header((2,))), "too early"),
        (member("a.npy", header((2,)) + bytes(9)), "bytes after"),
        (member("a.npy", header((2,), "<U9") + bytes(72)), "expected numbers"),
        (member("a.npy", header((2,), "O") + bytes(16)), "Python objects"),
        (member("a.npy", header("__import__('os').getcwd()")), "damaged"),
        (member("a.npy", header("(" * 200)), "damaged"),
        (member("a.npy", header((2,)) + bytes(8))[:-30], "damaged"),
    ],
    ids=["empty", "text", "no-header", "negative", "short", "long", "strings", "objects", "code",
         "deep", "cut"],
)  # fmt: skip
def test_damaged_npz(content, said, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    refused(path, said)


def test_npz_checksum(arrays, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(path, "damaged|CRC")


def test_nan_and_infinite_weights(state, tmp_path):
    for value in (float("nan"), float("inf")):
        state["blocks.1.mlp.fc1.weight"][3, 4] = value
        save_file(state, tmp_path / "a.safetensors")
        said = "1 of 2560 elements of blocks.1.mlp.fc1.weight are NaN or Inf"
        refused(tmp_path / "a.safetensors", said, heads=2)
    state["blocks.1.mlp.fc1.weight"][3, 4] = 0
    state["head.weight"].fill_(3e38)  # finite, though their sum is not
    save_file(state, tmp_path / "a.safetensors")
    assert vitkern.load(tmp_path / "a.safetensors", heads=2)


@pytest.mark.parametrize(
    "place",
    ["../outside.safetensors", "/etc/passwd", "sub/inner.safetensors", "..", "", ".", 3, None,
     "a\0.safetensors", "..\\outside.safetensors", "outside.txt", ["x.safetensors"]],
)  # fmt: skip
def test_shards_stay_in_their_folder(place, state, tmp_path):
    save_file(state, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": dict.fromkeys(state, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "same folder|no .safetensors")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000,
             '{"weight_map": {"a": "missing.safetensors"}}'],
)  # fmt: skip
def test_odd_indexes(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "not JSON|expected an object|no weight_map|no file")


def test_an_index_of_itself_ends(tmp_path):
    """A shard that is an index would be read again and again."""
    name = "model.safetensors.index.json"
    (tmp_path / name).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(tmp_path, "is no .safetensors or torch file")


def test_huge_json_is_not_read(state, tmp_path):
    save_file(state, tmp_path / "model.safetensors")
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    before = peak_mib()
    refused(tmp_path, "more than")
    assert peak_mib() - before < 64


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "os.system"}, {"num_attention_heads": -1}, {"num_attention_heads": "2"},
        {"num_attention_heads": 10**30}, {"layer_norm_eps": float("nan")}, {"layer_norm_eps": None},
        {"hidden_act": ["gelu"]}, {"num_attention_heads": 0}, {"layer_norm_eps": -1},
    ],
    ids=str,
)  # fmt: skip
def test_odd_configs(config, tmp_path):
    model = tiny(image_size=16, pool="token")
    vitkern.save(model, tmp_path / "a", "hf_vit")
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises((ValueError, TypeError), match=r"vitkern\.load: "):
        vitkern.load(tmp_path / "a")


@pytest.mark.parametrize("name, shape", [
    ("patch_embed.proj.weight", (32, 3, 4)), ("patch_embed.proj.weight", (0, 3, 4, 4)),
    ("patch_embed.proj.weight", (32, 3, 0, 0)), ("pos_embed", (1, 7, 32)), ("pos_embed", (17,)),
    ("pos_embed", (1, 0, 32)), ("cls_token", ()), ("head.weight", (3,)), ("head.weight", (0, 32)),
    ("blocks.0.mlp.fc1.weight", ()), ("blocks.0.attn.qkv.weight", (1,)),
    ("blocks.999999.norm1.weight", (32,)), ("blocks.9999999999999.norm1.weight", (32,)),
    ("reg_token", (1, 1 << 16, 32)), ("blocks.0.attn.q_norm.weight", (0,)),
    ("blocks.0.attn.relative_position_bias_table", (3, 2)),
], ids=str)  # fmt: skip
def test_absurd_shapes(name, shape, state, tmp_path):
    state[name] = torch.zeros(shape)
    save_file(state, tmp_path / "a.safetensors")
    before = peak_mib()
    with pytest.raises(ValueError, match=r"vitkern\.load: "):
        vitkern.load(tmp_path / "a.safetensors", heads=2)
    assert peak_mib() - before < 256


@pytest.mark.parametrize("layout, name", [
    ("hf_vit", "vit.embeddings.position_embeddings"), ("torchvision", "encoder.pos_embedding"),
    ("hf_vit", "vit.encoder.layer.0.intermediate.dense.weight"), ("hf_vit", "classifier.weight"),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (7,), (0, 0)], ids=str)
def test_absurd_shapes_of_other_layouts(layout, name, shape, tmp_path):
    path = tmp_path / ("a" if layout == "hf_vit" else "a.safetensors")
    vitkern.save(tiny(image_size=16), path, layout)
    file = path / "model.safetensors" if path.is_dir() else path
    state = load_file(file)
    state[name] = torch.zeros(shape)
    save_file(state, file)
    with pytest.raises(ValueError, match=r"vitkern\.load: "):
        vitkern.load(path, heads=2)


def test_integer_weights(state, tmp_path):
    state["head.weight"] = state["head.weight"].to(torch.int8)
    save_file(state, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "head.weight is int8, expected floating point", heads=2)


def test_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "MOST_MEMBERS", 3)
    np.savez(tmp_path / "a.npz", *[np.zeros(1)] * 5)
    refused(tmp_path / "a.npz", "it has 5 members")


def test_crc_of_the_bomb_s_builder():
    """`member` builds archives that are whole, but for the size."""
    with zipfile.ZipFile(io.BytesIO(member("a", b"hello"))) as archive:
        assert archive.read("a") == b"hello" and archive.getinfo("a").CRC == zlib.crc32(b"hello")


def test_an_adapter_of_itself_is_refused(tmp_path):
    about = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="adapter of another one"):
        vitkern.load(tmp_path)
