"""Damaged checkpoints and class lists, through the library's loader and `vitkern predict`."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import pathlib
import random
import struct
import traceback
from collections.abc import Callable

import safetensors.torch
import torch
from torch import Tensor, nn

from vitkern import ViT, config
from vitkern.__main__ import main
from vitkern.weights import timm

from .outcome import OK, REFUSED, Case, judge

# A variant so small that a case takes milliseconds; `classify` recognises it by its shapes.
config.VARIANTS["Z"] = (8, 1, 2, 16)
CLASSES = 3
DTYPES = ("float16", "bfloat16", "float64", "int64", "bool", "complex64", "float8_e4m3fn", "uint8")


@functools.cache
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = ViT("Z/8", image_size=16, classes=CLASSES)
    nn.init.normal_(model.head.weight)
    return model.state_dict()


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    if rng.random() < 0.2:
        return class_list(rng, folder)
    suffix = rng.choice((".safetensors", ".pt", ".pt", ".bin"))
    changes = [rng.choice(CHANGES) for _ in range(rng.choice((0, 1, 1, 2)))]
    damage = rng.choice(DAMAGES[suffix != ".safetensors"]) if rng.random() < 0.5 else None
    by_command, seed = rng.random() < 0.6, rng.randrange(2**31)
    words = [change.__name__ for change in changes] + ([damage.__name__] if damage else [])
    how = "classify" if by_command else "timm.load"

    def run() -> str:
        folder.mkdir()
        own = random.Random(seed)
        changed: object = copy.deepcopy(state())
        for change in changes:
            changed = change(own, changed)
        path = folder / f"weights{suffix}"
        if not save(changed, path):
            return REFUSED  # the format itself cannot hold it
        if damage:
            damage(own, path)
        return classify(path, picture(folder)) if by_command else load(path, own)

    return Case(f"{how} weights{suffix}: {', '.join(words) or 'whole'} ({seed})", run)


def save(what: object, path: pathlib.Path) -> bool:
    try:
        if path.suffix == ".safetensors":
            safetensors.torch.save_file(what, path)
        else:
            torch.save(what, path)
    except Exception:
        return False
    return True


def load(path: pathlib.Path, rng: random.Random) -> str:
    model = ViT("Z/8", image_size=rng.choice((16, 32)), classes=CLASSES)
    try:
        timm.load(model, path, resize_positions=rng.random() < 0.5, strict=rng.random() < 0.7)
    except Exception as error:
        if judge(error) != REFUSED:
            raise
        return REFUSED
    return OK


class Traceback(Exception):
    """What a user would see of a command that does not catch it."""


def classify(
    weights: pathlib.Path, *images: pathlib.Path, classes: pathlib.Path | None = None
) -> str:
    """Run the command in this process; an exception that leaves it is a traceback on a terminal."""
    arguments = ["classify", *map(str, images), "--weights", str(weights)]
    arguments += ["--classes", str(classes)] if classes else []
    said, status = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f'File "{place.filename}", line {place.lineno}'
        raise Traceback(f"{type(error).__name__}: {error}\n{where}") from error
    if "Traceback" in said.getvalue():
        raise Traceback(said.getvalue())
    if status == 0:
        return OK
    if status not in (1, 2) or not said.getvalue().strip():
        raise Traceback(f"status {status} and on stderr {said.getvalue()!r}")
    return REFUSED


def picture(folder: pathlib.Path) -> pathlib.Path:
    from PIL import Image

    path = folder / "picture.png"
    Image.new("RGB", (20, 20), (200, 100, 50)).save(path)
    return path


# ---- other contents ----


def some_name(rng: random.Random, state: dict) -> str:
    usual = ("head.weight", "pos_embed", "patch_embed.proj.weight", "cls_token", "head.bias")
    names = [name for name in usual if name in state]
    return rng.choice(names) if names and rng.random() < 0.6 else rng.choice(list(state))


def reshaped(rng: random.Random, state: object) -> object:
    if isinstance(state, dict) and state:
        name = some_name(rng, state)
        t = state[name]
        if isinstance(t, Tensor) and t.numel() < 2**24:  # an expanded one has no end
            ways: list[Callable[[], Tensor]] = [
                lambda: torch.tensor(1.0), lambda: t.reshape(-1), lambda: t[None], lambda: t[:0],
                lambda: t[..., None], lambda: t.sum(), lambda: torch.zeros(0),
                lambda: torch.zeros(1, 1, 1, 1, 1), lambda: t.mT if t.ndim > 1 else t,
            ]  # fmt: skip
            state[name] = rng.choice(ways)().contiguous()
    return state


def retyped(rng: random.Random, state: object) -> object:
    if isinstance(state, dict) and state:
        name = some_name(rng, state)
        if isinstance(state[name], Tensor):
            state[name] = state[name].to(getattr(torch, rng.choice(DTYPES)))
    return state


def expanded(rng: random.Random, state: object) -> object:
    """Tensors of stride 0: a few bytes in the file, any size in memory."""
    if isinstance(state, dict) and state:
        size = rng.choice(((2**40,), (CLASSES, 2**40), (2**33, 8), (1, 5, 2**50), (2**62, 2)))
        state[some_name(rng, state)] = torch.zeros(1).expand(size)
    return state


def odd_values(rng: random.Random, state: object) -> object:
    if isinstance(state, dict) and state:
        name = some_name(rng, state)
        if isinstance(state[name], Tensor) and state[name].is_floating_point():
            state[name] = torch.full_like(state[name], rng.choice((float("nan"), 1e38, -1e-40)))
    return state


def odd_tensor(rng: random.Random, state: object) -> object:
    if isinstance(state, dict) and state:
        t = torch.randn(8)
        odd = (
            t.to_sparse(), torch.empty(8, device="meta"), torch._neg_view(t),
            torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), t.view(torch.complex64).conj(),
            nn.Parameter(t), torch.nested.nested_tensor([t, t[:3]]), None, 3, "text", [t],
        )  # fmt: skip
        state[some_name(rng, state)] = rng.choice(odd)
    return state


def odd_keys(rng: random.Random, state: object) -> object:
    if isinstance(state, dict) and state:
        key = rng.choice((0, 1.5, None, (), "", "blocks", "blocks.", "blocks.x.norm1.weight",
                          "module.", "dist_token", "blocks.-1.y", "\u0000", b"bytes"))  # fmt: skip
        state[key] = state.pop(some_name(rng, state))
    return state


def without_keys(rng: random.Random, state: object) -> object:
    if isinstance(state, dict):
        for _ in range(rng.choice((1, 1, 3, len(state)))):
            if state:
                state.pop(some_name(rng, state))
    return state


def wrapped(rng: random.Random, state: object) -> object:
    key = rng.choice(("state_dict", "model", "module", "model_ema", "optimizer"))
    wraps = ({key: state, "epoch": 3}, {key: {key: state}}, [state], (state,), {key: None}, {},
             {key: 3}, state, {f"module.{k}": v for k, v in state.items()}
             if isinstance(state, dict) else state)  # fmt: skip
    return rng.choice(wraps)


def something_else(rng: random.Random, state: object) -> object:
    loop: dict = {}
    loop["state_dict"] = loop
    return rng.choice((None, 3, "text", torch.zeros(3), [1, 2], {1, 2}, {}, loop, {"a": {}}, b""))


CHANGES = (
    reshaped, reshaped, retyped, expanded, odd_values, odd_tensor, odd_keys, without_keys, wrapped,
    something_else,
)  # fmt: skip


# ---- damaged bytes ----


def cut(rng: random.Random, path: pathlib.Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(content)), -1))])


def flipped(rng: random.Random, path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 2, 8, 64))):
        reach = min(len(content), rng.choice((16, 256, 2**30)))
        content[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def noise(rng: random.Random, path: pathlib.Path) -> None:
    content = path.read_bytes()
    start = rng.randrange(len(content))
    path.write_bytes(content[:start] + rng.randbytes(rng.choice((1, 100))) + content[start + 1 :])


def extended(rng: random.Random, path: pathlib.Path) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 8, 1000))))


def sparse(rng: random.Random, path: pathlib.Path) -> None:
    """A file of many gigabytes that takes no room on the disk."""
    os.truncate(path, rng.choice((50 * 2**30, 2**40)))


def replaced(rng: random.Random, path: pathlib.Path) -> None:
    path.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.write_text("hello")
    elif kind == 3:
        path.symlink_to("/dev/null")


def header(rng: random.Random, path: pathlib.Path) -> None:
    """safetensors' own: 8 bytes of length, then JSON."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    facts, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = rng.choice(list(facts) or ["nothing"])
    facts.setdefault(name, {})
    kind = rng.randrange(7)
    numbers = (0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1.5, None, "8", float("inf"))
    text = ""
    if kind == 0:
        facts[name]["shape"] = [rng.choice(numbers) for _ in range(rng.randrange(4))]
    elif kind == 1:
        facts[name]["data_offsets"] = [rng.choice(numbers), rng.choice(numbers)]
    elif kind == 2:
        facts[name]["dtype"] = rng.choice(("F64", "BF16", "U8", "F4", "X", "", None, 3, "C64"))
    elif kind == 3:
        facts["__metadata__"] = rng.choice(({"a": "b"}, {"a": 3}, [], None, "x"))
    elif kind == 4:
        deep = rng.choice((100, 10**4, 10**5))
        text = rng.choice(("[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep))
    elif kind == 5:
        length = rng.choice((0, 1, 2**40, 2**63, 2**64 - 1, length + 1, len(content)))
        path.write_bytes(struct.pack("<Q", length) + content[8:])
        return
    else:
        facts[rng.choice(("", "head.weight", "a" * 9999))] = facts.pop(name)
    text = text or json.dumps(facts)
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + data)


DAMAGES = (
    (cut, flipped, noise, extended, sparse, replaced, header, header, header),
    (cut, flipped, flipped, noise, extended, sparse, replaced),
)


# ---- class lists ----


def class_list(rng: random.Random, folder: pathlib.Path) -> Case:
    deep = rng.choice((10**3, 10**5))
    contents = (
        '["a", "b", "c"]', '{"0": "a", "1": "b", "2": "c"}', '{"0": ["n0", "a"]}', "", "[]", "{}",
        "3", "null", '"abc"', '["a", "b"]', '["a", "b", 3]', '["a", "b", null]', '{"0": "a"}',
        '{"0": "a", "1": "b", "x": "c"}', '{"0": "a", "1": "b", "-1": "c"}', '[["a"], [], ["c"]]',
        '{"0": "a", "1": "b", "1e3": "c"}', '{"0": "a", "1": "b", "' + "9" * 5000 + '": "c"}',
        '[{"a": 1}, "b", "c"]', "[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep,
        '["a", "b", "c"', "[NaN, Infinity, -Infinity]", '["a", "b", "\\ud800"]', "[1, 2, 3]",
        '{"0": "a", "0": "b", "0": "c"}', "9" * 10000, "\ufeff[]", '[["a", 3], "b", "c"]',
    )  # fmt: skip
    content = rng.choice(contents).encode()
    if rng.random() < 0.3:
        content = rng.choice((content + b"\xff", content.decode().encode("utf-16"), b"\0" * 100))
    missing = rng.random() < 0.05

    def run() -> str:
        folder.mkdir()
        weights, path = folder / "weights.safetensors", folder / "classes.json"
        save(state(), weights)
        if not missing:
            path.write_bytes(content)
        return classify(weights, picture(folder), classes=path)

    return Case(f"classify --classes {content[:60]!r} ({len(content)} bytes)", run)
