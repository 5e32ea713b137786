"""Train or fine-tune a Vision Transformer by a recipe, a TOML file or flags.

Flags go before the file's or recipe's settings. With several processes: torchrun -m vitkern train.

Examples:
    vitkern train --list
    vitkern train --recipe digits
    vitkern train --recipe cifar10-small --data DIR --epochs 5
    vitkern train --resume RUN
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from ..train.settings import FLAGS, SECTIONS, Settings, by_key, read

KINDS = {"int": int, "float": float, "str": str}


def arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--recipe", metavar="NAME", help="one of --list")
    source.add_argument("--config", type=pathlib.Path, metavar="TOML", help="a file of settings")
    source.add_argument(
        "--resume", type=pathlib.Path, metavar="RUN", help="go on with a run that was interrupted"
    )
    parser.add_argument("--list", action="store_true", help="print the recipes and stop")
    parser.add_argument(
        "--show", action="store_true", help="print the settings as a TOML file and stop"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("runs"), metavar="FOLDER",
        help="where a run makes its folder, named by the time (default runs)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N",
        help="train N times with seeds seed, seed + 1, ...: mean and standard deviation",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="any key of the file, such as model.drop_path=0.1; repeatable",
    )  # fmt: skip
    for section, record in SECTIONS.items():
        group = parser.add_argument_group(f"[{section}]", (record.__doc__ or "").split(";")[0])
        for field, flag in fields_of(record):
            add_flag(group, section, field, flag)


def fields_of(record: type) -> Iterator[tuple[dataclasses.Field, str]]:
    for field in dataclasses.fields(record):
        if field.name != "options":
            name = FLAGS.get(field.name, field.name)
            yield field, "--" + name.replace("_", "-")


def add_flag(group: Any, section: str, field: dataclasses.Field, flag: str) -> None:
    rule, shown = field.metadata, field.default
    about = (
        f"{rule['about']} ({shown})".strip() if shown not in ("", 0, 0.0, False) else rule["about"]
    )
    given: dict[str, Any] = {"dest": f"{section}.{field.name}", "help": about.replace("%", "%%")}
    if field.type == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, **given)
    elif rule["among"]:
        group.add_argument(flag, choices=[one for one in rule["among"] if one], **given)
    else:
        kind = KINDS[str(field.type)]
        group.add_argument(flag, type=kind, metavar=str(field.type).upper(), **given)


def run(given: argparse.Namespace) -> int:
    from ..train import recipes

    if given.list:
        print_recipes()
        return 0
    if given.repeats < 1:
        raise ValueError(f"--repeats {given.repeats}: train at least once")
    if given.repeats > 1 and given.resume:
        raise ValueError("--repeats starts new runs: leave --resume out")
    if given.resume:
        from ..train.run import settings_of

        base = settings_of(given.resume)
    elif given.recipe:
        base = recipes.settings(given.recipe)
    else:
        base = read(given.config) if given.config else Settings()
    settings = with_flags(base, given)
    if given.show:
        print(settings.text(), end="")
        return 0
    return train(settings, given)


def with_flags(base: Settings, given: argparse.Namespace) -> Settings:
    """The settings with everything that the command line says."""
    for section, record in SECTIONS.items():
        for field, flag in fields_of(record):
            value = getattr(given, f"{section}.{field.name}")
            if value is not None:
                base = base.changed({section: {field.name: value}}, flag)
    for pair in given.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: write KEY=VALUE")
        base = base.changed(by_key(key.strip(), value.strip(), f"--set {key}"), f"--set {key}")
    return base


def train(settings: Settings, given: argparse.Namespace) -> int:
    import os
    import statistics

    from ..train import run as runs

    results = []
    for i in range(given.repeats):
        seeded = settings.changed({"loop": {"seed": settings.loop.seed + i}}, "--seed")
        result = runs.train(seeded, given.out, given.resume)
        results.append(result.accuracy)
        if os.environ.get("RANK", "0") == "0":
            print(
                f"accuracy {result.accuracy:.2%}, loss {result.loss:.4f}, {result.seconds:.0f} s:"
                f" {result.folder}"
            )
    if len(results) > 1:
        mean, spread = statistics.mean(results), statistics.stdev(results)
        print(f"accuracy of {len(results)} runs: {mean:.2%} ± {spread:.2%}")
    return 0


def print_recipes() -> None:
    import textwrap

    from ..train import recipes

    for name in recipes.names():
        about = " ".join(recipes.settings(name).about.split())
        print(f"{name}\n{textwrap.indent(textwrap.fill(about, 92), '    ')}")
