"""Resident memory of a model held in each way, a process each: python tools/memory.py [--write]

PyTorch eager, vitkern with its parameters beside the packed weights, vitkern with the packed
weights alone (keep_weights=False), and OpenVINO where it is installed. The figures are growths of
the resident set over what it was before the model was made, libraries loaded and threads started.
--write puts the rows into benchmarks/results/resident.jsonl and the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
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
SIZE, FORWARDS = 224, 12  # more than engines.base.TURNS: what is not used has been dropped
STAGES = ("made", "first", "steady", "peak")


def resident(field: str = "VmRSS") -> int:
    """VmRSS or VmHWM, the highest it has been, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def settle() -> int:
    """Give back what glibc's malloc holds free, start the high-water mark anew."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return resident()


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
    found = {"made": resident() - before}
    run(model, SIZE, precision)
    found["first"] = resident() - before
    for _ in range(1 if provider == "eager" else FORWARDS):  # some take seconds
        run(model, SIZE, precision)
    found["steady"] = resident() - before
    found["peak"] = resident("VmHWM") - before
    return found


def in_openvino(file: str, precision: str) -> dict[str, int]:
    import numpy
    import openvino

    core = openvino.Core()
    image = numpy.zeros((1, 3, SIZE, SIZE), numpy.float32)
    before = settle()
    hint = {"INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else "bf16"}
    model = core.compile_model(file, "CPU", hint)
    found = {"made": resident() - before}
    request = model.create_infer_request()
    request.infer([image])
    found["first"] = resident() - before
    for _ in range(FORWARDS):
        request.infer([image])
    found["steady"] = resident() - before
    found["peak"] = resident("VmHWM") - before
    return found


def export(name: str, file: str) -> None:
    """timm's model as OpenVINO reads it, in fp32."""
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
        converted = openvino.convert_model(model, example_input=given)
    openvino.save_model(converted, file, compress_to_fp16=False)


def child(*words: str) -> dict[str, int]:
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str) -> list[dict[str, Any]]:
    from benchmarks.rows import commit
    from vitkern.measure.machine import describe

    shared = {"kind": "resident", "name": name, "machine": describe()}
    shared |= {"commit": commit(), "date": datetime.date.today().isoformat()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder, "model.xml"))
        there = importlib.util.find_spec("openvino") is not None
        if there:
            child("export", name, file)
        for provider in PROVIDERS:
            if provider == "openvino" and not there:
                continue
            for precision in ("fp32", "bf16"):
                what = file if provider == "openvino" else name
                found = child(provider, what, precision)
                rows.append({"provider": provider, "precision": precision, **found, **shared})
                print(f"{provider} {precision}: {found}", file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    from benchmarks.tables import stamp

    lines = [
        "| model | precision | held by | made | after a forward | after more | peak |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=lambda row: row["precision"], reverse=True):
        cells = " | ".join(f"{row[stage] / 2**20:.0f} MiB" for stage in STAGES)
        head = f"{row['name']} | {row['precision']} | {PROVIDERS[row['provider']]}"
        lines.append(f"| {head} | {cells} |")
    notes = (
        "Growth of the resident set of a fresh process, a 224 × 224 image at a time; made: before"
        " the first forward, peak: the highest point of all. OpenVINO reads an fp32 file, which it"
        f" maps. {stamp(rows)}."
    )
    return "\n".join([*lines, "", notes])


def write(rows: list[dict[str, Any]]) -> None:
    from benchmarks.report import between

    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(between(PAGE.read_text(), "resident", table(rows), PAGE))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="L/16")
    parser.add_argument("--write", action="store_true", help="the results file and the page")
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
    rows = measure(given.model)
    print(table(rows))
    if given.write:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
