"""Resident memory of a model held in each way, a process each: python tools/memory.py [--write]

PyTorch eager, vitkern with its parameters beside the packed weights, vitkern with the packed
weights alone (keep_weights=False), and OpenVINO where it is installed (for int8 with nncf), each at
every precision that it has. The figures are growths of the resident set over what it was before
the model was made, libraries loaded and threads started. --write puts the rows into
benchmarks/results/resident.jsonl, beside those of holders that this run leaves out (--only), and
the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "resident.jsonl"
PAGE = ROOT / "docs" / "performance.md"
PROVIDERS = {
    "eager": "PyTorch",
    "vitkern": "vitkern",
    "alone": "vitkern, keep_weights=False",
    "openvino": "OpenVINO",
}
PRECISIONS = {  # of each
    "eager": ("fp32", "bf16"),
    "vitkern": ("fp32", "bf16", "int8"),
    "alone": ("fp32", "bf16", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
}
SIZE, FORWARDS = 224, 12  # more than engines.base.TURNS: what is not used has been dropped
STAGES = ("made", "first", "steady", "peak")
CALIBRATION_IMAGES = 8  # of OpenVINO's int8, as in vitkern/bench/convert.py


def filled(name: str) -> Any:
    """A model in eval mode whose parameters were written: random ones take much longer."""
    import torch

    import vitkern

    model = vitkern.ViT(name, device="meta").to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def in_torch(provider: str, name: str, precision: str) -> dict[str, int]:
    import torch

    import vitkern
    from vitkern.measure.memory import resident, settle

    tiny = vitkern.ViT(
        image_size=32, width=64, depth=1, heads=2, mlp_width=128, classes=10
    ).eval()  # libraries and threads

    def run(model: Any, size: int, precision: str) -> None:
        image = torch.zeros(1, 3, size, size)
        with torch.inference_mode():
            if provider == "eager" and precision == "bf16":
                model(image.bfloat16())
            else:
                model(image)

    def prepared(model: Any) -> Any:
        if provider == "eager":
            model.path = "reference"
            return model.bfloat16() if precision == "bf16" else model
        model.precision = precision
        if provider == "alone":
            model.release_weights()
        return model

    run(prepared(tiny), 32, precision)
    before = settle()
    model = prepared(filled(name))
    found = {"made": resident("VmRSS") - before}
    run(model, SIZE, precision)
    found["first"] = resident("VmRSS") - before
    for _ in range(1 if provider == "eager" else FORWARDS):  # some take seconds
        run(model, SIZE, precision)
    found["steady"] = resident("VmRSS") - before
    found["peak"] = resident("VmHWM") - before
    return found


def in_openvino(file: str, precision: str) -> dict[str, int]:
    import numpy
    import openvino

    from vitkern.measure.memory import resident, settle

    core = openvino.Core()
    image = numpy.zeros((1, 3, SIZE, SIZE), numpy.float32)
    before = settle()
    hint = {"INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32"}
    model = core.compile_model(file, "CPU", hint)
    found = {"made": resident("VmRSS") - before}
    request = model.create_infer_request()
    request.infer([image])
    found["first"] = resident("VmRSS") - before
    for _ in range(FORWARDS):
        request.infer([image])
    found["steady"] = resident("VmRSS") - before
    found["peak"] = resident("VmHWM") - before
    return found


def export(name: str, file: str, precision: str) -> None:
    """timm's model as OpenVINO reads it, in fp32 or as nncf's int8."""
    import openvino
    import torch

    from vitkern.bench import timm_import

    timm_import.prepare()
    import timm

    sizes = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}
    size, patch = name.split("/")
    model = timm.create_model(f"vit_{sizes[size]}_patch{patch}_224").eval()
    with torch.no_grad():
        given = torch.zeros(1, 3, SIZE, SIZE)
        converted = openvino.convert_model(model, example_input=given, input=list(given.shape))
    if precision == "int8":
        import nncf

        seeded = torch.Generator().manual_seed(1)
        shown = [
            torch.randn(given.shape, generator=seeded).numpy() for _ in range(CALIBRATION_IMAGES)
        ]
        converted = nncf.quantize(
            converted, nncf.Dataset(shown), model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(shown),
        )  # fmt: skip
    openvino.save_model(converted, file, compress_to_fp16=False)


def child(*words: str) -> dict[str, int]:
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, providers: Sequence[str]) -> list[dict[str, Any]]:
    from benchmarks.rows import commit
    from vitkern.measure.machine import describe

    shared = {"kind": "resident", "name": name, "machine": describe()}
    shared |= {"commit": commit(), "date": datetime.date.today().isoformat()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for provider, precision in ways(providers):
            what = name
            if provider == "openvino":
                kind = "int8" if precision == "int8" else "fp32"
                what = str(pathlib.Path(folder, f"{kind}.xml"))
                if not pathlib.Path(what).exists():
                    child("export", name, what, kind)
            found = child(provider, what, precision)
            rows.append({"provider": provider, "precision": precision, **found, **shared})
            print(f"{provider} {precision}: {found}", file=sys.stderr)
    return rows


def ways(providers: Sequence[str]) -> list[tuple[str, str]]:
    """Who holds a model at which precision, as far as it is installed."""
    there = {name: importlib.util.find_spec(name) is not None for name in ("openvino", "nncf")}
    left_out = set() if there["openvino"] else {"fp32", "bf16", "int8"}
    left_out |= set() if there["nncf"] else {"int8"}
    return [
        (provider, precision)
        for provider in providers
        for precision in PRECISIONS[provider]
        if not (provider == "openvino" and precision in left_out)
    ]


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows, and the old ones of the same model that they do not replace, in order."""

    def key(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["name"], row["precision"], row["provider"]

    names = {row["name"] for row in new}
    found = {key(row): row for row in [*old, *new] if row["name"] in names}
    order = [(p, provider) for p in ("fp32", "bf16", "int8") for provider in PROVIDERS]
    return sorted(found.values(), key=lambda row: order.index((row["precision"], row["provider"])))


def table(rows: list[dict[str, Any]]) -> str:
    from benchmarks.tables import stamp

    lines = [
        "| model | precision | held by | made | after a forward | after more | peak |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = " | ".join(f"{row[stage] / 2**20:.0f} MiB" for stage in STAGES)
        head = f"{row['name']} | {row['precision']} | {PROVIDERS[row['provider']]}"
        lines.append(f"| {head} | {cells} |")
    notes = (
        "Growth of the resident set of a fresh process, a 224 × 224 image at a time; made: before"
        " the first forward, peak: the highest point of all. OpenVINO reads a file, which it maps."
    )
    runs: dict[str, list[str]] = {}
    for row in rows:
        whose = runs.setdefault(stamp([row]), [])
        if PROVIDERS[row["provider"]] not in whose:
            whose.append(PROVIDERS[row["provider"]])
    for said, whose in runs.items():
        notes += f" {said}." if len(runs) == 1 else f" {'; '.join(whose)}: {said}."
    return "\n".join([*lines, "", notes])


def write(rows: list[dict[str, Any]]) -> None:
    from benchmarks.report import between
    from benchmarks.rows import read

    rows = merged(read(RESULTS) if RESULTS.is_file() else [], rows)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(between(PAGE.read_text(), "resident", table(rows), PAGE))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="L/16")
    parser.add_argument("--write", action="store_true", help="the results file and the page")
    parser.add_argument(
        "--only", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="default: all"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        what, *rest = given.child
        if what == "export":
            export(*rest)
            found: dict[str, int] = {}
        else:
            found = in_openvino(*rest) if what == "openvino" else in_torch(what, *rest)
        print(json.dumps(found))
        return 0
    rows = measure(given.model, given.only)
    if not rows:
        print("memory: openvino is not installed (requirements-peers.txt)", file=sys.stderr)
        return 2
    print(table(rows))
    if given.write:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
