"""What a training run is made of: sections of a TOML file, each a record whose fields are checked.

A field's comment is its help on the command line, where `lr` of the section `optimizer` is `--lr`.
No torch here: the command line asks this module for its flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_type_hints

from ..config import ViTConfig
from ..image_files import NORMALISATIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_FILE = 1 << 20  # bytes; a recipe has one or two thousand


def _is(
    default: Any, about: str, least: float = 0, most: float = math.inf, among: tuple = ()
) -> Any:
    """A field with its help and what it may be."""
    rule = {"about": about, "least": least, "most": most, "among": among}
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Model:
    """Which network; `options` are fields of `ViTConfig` (dropout, drop_path, width, ...)."""

    name: str = _is("B/16", "a variant such as Ti/16, or timm's name")
    weights: str = _is("", "start from these weights, in any layout that vitkern.load reads")
    new_head: bool = _is(True, "with --weights: replace the classifier by one of zeros")
    checkpointing: bool = _is(False, "recompute blocks in the backward: less memory, more time")
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Where the images are and what happens to them."""

    kind: str = _is(
        "", "how they are stored; guessed if not given",
        among=("", "digits", "folder", "cifar10", "cifar100", "fashion-mnist"),
    )  # fmt: skip
    path: str = _is("", "the folder of the data (not for digits)")
    broken: str = _is(
        "skip", "a broken image is reported and skipped, or fatal", among=("skip", "error")
    )
    normalisation: str = _is("imagenet", "mean and std of the pixels", among=tuple(NORMALISATIONS))
    eval_share: float = _is(
        0.2, "held out for evaluation where the data has no part for it", 0, 0.9
    )
    eval_crop: float = _is(1.0, "share of the short side that the evaluation crop keeps", 0.1, 1)
    limit: int = _is(0, "use only so many training images, the first of each class (0: all)")
    eval_limit: int = _is(0, "the same for evaluation")
    workers: int = _is(2, "processes that decode and augment; 0: the main one", 0, 256)
    crop: str = _is("none", "random crop", among=("none", "pad", "resized"))
    crop_padding: int = _is(4, "pixels around the image with crop = pad", 0, 1024)
    crop_least: float = _is(0.08, "smallest share of the image with crop = resized", 0.01, 1)
    flip: float = _is(0.0, "probability of a horizontal flip", 0, 1)
    rotation: float = _is(0.0, "largest rotation in degrees, either way", 0, 180)
    brightness: float = _is(0.0, "largest relative change", 0, 1)
    contrast: float = _is(0.0, "largest relative change", 0, 1)
    saturation: float = _is(0.0, "largest relative change", 0, 1)
    hue: float = _is(0.0, "largest change, in turns of the colour wheel", 0, 0.5)
    mixup: float = _is(0.0, "alpha of mixup's Beta distribution; 0: none", 0, 100)
    cutmix: float = _is(0.0, "alpha of cutmix's; with both, each has half of the batches", 0, 100)


@dataclass(frozen=True)
class Optimizer:
    """PyTorch's fused optimizers."""

    optimizer: str = _is("adamw", "", among=("sgd", "adam", "adamw"))
    lr: float = _is(1e-3, "highest learning rate")
    weight_decay: float = _is(0.0, "decoupled with adamw, part of the gradient with the others")
    decay_all: bool = _is(False, "decay biases, norms, tokens and positions, too")
    momentum: float = _is(0.9, "of sgd", 0, 0.9999)
    beta1: float = _is(0.9, "of adam and adamw", 0, 0.9999)
    beta2: float = _is(0.999, "of adam and adamw", 0, 0.99999)
    clip: float = _is(0.0, "clip gradients at this norm; 0: do not")


@dataclass(frozen=True)
class Schedule:
    """How long, and the learning rate over time."""

    epochs: int = _is(10, "passes through the training images", 1)
    steps: int = _is(0, "stop after so many steps instead; 0: after the epochs")
    warmup: int = _is(0, "steps over which the learning rate rises linearly")
    warmup_epochs: float = _is(0.0, "the same in epochs")
    decay: str = _is(
        "cosine", "of the learning rate, to final_lr", among=("constant", "linear", "cosine")
    )
    final_lr: float = _is(0.0, "learning rate of the last step")


@dataclass(frozen=True)
class Loop:
    """One step, the machine, what is kept."""

    batch: int = _is(128, "images a step, over all processes", 1, 1 << 20)
    accumulate: int = _is(1, "parts of a batch that are computed one after the other", 1, 1 << 20)
    precision: str = _is("fp32", "bf16: autocast", among=("fp32", "bf16"))
    label_smoothing: float = _is(0.0, "share of the target spread over all classes", 0, 0.99)
    ema: float = _is(
        0.0, "decay of an exponential moving average, which is evaluated; 0: none", 0, 0.99999
    )
    seed: int = _is(0, "of weights, order, augmentation and dropout", 0, 2**62)
    device: str = _is("auto", "cpu, cuda or auto")
    parallel: str = _is("ddp", "with torchrun: whole models or sharded ones", among=("ddp", "fsdp"))
    eval_every: int = _is(1, "epochs between evaluations", 1)
    save_every: int = _is(0, "steps between checkpoints; 0: one an epoch")
    tensorboard: bool = _is(False, "write TensorBoard events beside the CSV files")


SECTIONS: dict[str, type] = {
    "model": Model, "data": Data, "optimizer": Optimizer, "schedule": Schedule, "loop": Loop,
}  # fmt: skip
# The name of a flag where it differs from the field's, which has its section beside it.
FLAGS = {"name": "model", "path": "data", "kind": "data_kind", "decay": "lr_decay"}


@dataclass(frozen=True)
class Settings:
    """A whole run; `name` is the recipe's."""

    name: str = "run"
    about: str = ""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    loop: Loop = field(default_factory=Loop)

    def changed(self, changes: Mapping[str, Mapping[str, Any]], where: str) -> Settings:
        """A copy with some fields of some sections changed, checked; `where` begins an error."""
        parts = {}
        for section, given in changes.items():
            old = getattr(self, section)
            found = dict(given)
            if section == "model":
                found["options"] = {**old.options, **found.get("options", {})}
            parts[section] = _record(old, found, f"{where}: [{section}]")
        return dataclasses.replace(self, **parts)

    def text(self) -> str:
        """As a TOML file that `read` takes."""
        lines = [f"about = {json.dumps(self.about)}"]
        for section in SECTIONS:
            record = getattr(self, section)
            values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
            values.update(values.pop("options", {}))
            lines += ["", f"[{section}]"]
            lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
        return "\n".join(lines) + "\n"


def read(path: pathlib.Path) -> Settings:
    """A TOML file's settings; an error names file, section and key, and the nearest known key."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path}: {path.stat().st_size} bytes are too many for settings")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not TOML ({error})") from error
    return parse(found, str(path), path.stem)


def parse(found: Mapping[str, Any], where: str, name: str = "run") -> Settings:
    """The settings in the tables of a TOML file; unknown fields of [model] are `ViTConfig`'s."""
    about = found.get("about", "")
    if not isinstance(about, str):
        raise ValueError(f"{where}: about must be a text, not {about!r:.80}")
    tables: dict[str, dict[str, Any]] = {}
    for section, table in found.items():
        if section == "about":
            continue
        if section not in SECTIONS:
            _unknown(where, "section", section, ["about", *SECTIONS])
        if not isinstance(table, Mapping):
            raise ValueError(f"{where}: {section} must be a table, [{section}]")
        tables[section] = dict(table)
    if "model" in tables:
        tables["model"] = _with_options(tables["model"], f"{where}: [model]")
    return Settings(name=name, about=about.strip()).changed(tables, where)


def by_key(key: str, value: Any, where: str) -> dict[str, dict[str, Any]]:
    """`optimizer.lr` and a value as tables; the value of a text is read as TOML would."""
    section, _, name = key.partition(".")
    if section not in SECTIONS or not name:
        _unknown(where, "key", key, [f"{s}.{n}" for s in SECTIONS for n in names_of(s)])
    if isinstance(value, str):
        try:
            value = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            pass  # a text without quotes
    table = {name: value}
    return {section: _with_options(table, where) if section == "model" else table}


def names_of(section: str) -> list[str]:
    """The keys of a section."""
    names = [f.name for f in dataclasses.fields(SECTIONS[section]) if f.name != "options"]
    return names + (option_names() if section == "model" else [])


def option_names() -> list[str]:
    """Fields of ViTConfig that a recipe may set: the data decides on classes, mean and std."""
    fixed = {"classes", "mean", "std"}
    return [f.name for f in dataclasses.fields(ViTConfig) if f.name not in fixed]


def _with_options(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """[model] with everything but its own fields moved into `options`."""
    own = {f.name for f in dataclasses.fields(Model)} - {"options"}
    for name in table:
        if name not in own and name not in option_names():
            _unknown(where, "key", name, [*own, *option_names()])
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in table.items() if n not in own}
    return {**{n: v for n, v in table.items() if n in own}, "options": options}


def _record(old: Any, given: Mapping[str, Any], where: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(old)}
    hints = get_type_hints(type(old))
    values = {}
    for name, value in given.items():
        if name not in known:
            _unknown(where, "key", name, [n for n in known if n != "options"])
        values[name] = value
        if name != "options":
            values[name] = checked(value, hints[name], known[name].metadata, f"{where} {name}")
    return dataclasses.replace(old, **values)


def checked(value: Any, kind: Any, rule: Mapping[str, Any], where: str) -> Any:
    """The value if it is of the field's kind and range."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        words = {float: "a number", int: "an integer", str: "a text", bool: "true or false"}
        raise ValueError(f"{where} must be {words[kind]}, not {value!r:.80}")
    if rule["among"] and value not in rule["among"]:
        _unknown(where, "value", value, [one for one in rule["among"] if one])
    if kind in (int, float) and not rule["least"] <= value <= rule["most"]:
        least, most = rule["least"], rule["most"]
        bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{where} must be {bounds}, not {value!r:.80}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, not {value!r}")
    return value


def _unknown(where: str, what: str, given: str, known: list[str]) -> NoReturn:
    close = difflib.get_close_matches(str(given), known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    raise ValueError(f"{where}: there is no {what} {given!r:.80}; {hint}")


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
