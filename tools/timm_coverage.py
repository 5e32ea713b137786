"""Which of timm's vit, deit, eva and beit models `vitkern.accelerate` takes, the rest by reason.

python tools/timm_coverage.py
"""

from __future__ import annotations

import collections
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from vitkern.bench import timm_import
from vitkern.foreign.timm import config_of

FAMILIES = ("vit", "deit", "deit3", "eva", "eva02", "beit", "beitv2")  # a name's first word


def survey() -> tuple[list[str], dict[str, list[str]]]:
    """Models that can be expressed, and those that cannot by the reason; nothing has memory."""
    timm_import.prepare()
    import timm

    taken: list[str] = []
    refused: dict[str, list[str]] = collections.defaultdict(list)
    for name in timm.list_models():
        if name.split("_")[0] in FAMILIES:
            with torch.device("meta"):
                model = timm.create_model(name)
            try:
                config_of(model)
                taken.append(name)
            except ValueError as error:
                refused[str(error).partition(": ")[2]].append(name)
    return taken, refused


def main() -> None:
    taken, refused = survey()
    count = len(taken) + sum(map(len, refused.values()))
    print(f"accelerate takes {len(taken)} of {count} models\n\n| models | why not | such as |")
    print("|--:|---|---|")
    for reason, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"| {len(names)} | {reason} | `{names[0]}` |")


if __name__ == "__main__":
    main()
