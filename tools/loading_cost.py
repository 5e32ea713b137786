"""What loading a checkpoint costs: time and peak memory beside reading the file's bytes.

    python -m tools.loading_cost [--model L/16] [--runs 5] [--ways WAY ...]

Each way runs in a process of its own, in turns; the file is in the page cache. "read" copies its
bytes into memory once. "and pack" has the engine ready for a first forward, as "packed" has, which
is a file of `save_packed`. Memory beyond the libraries': the process's own afterwards, and its
peak, which has the pages of the mapped file in it, though the system may take those back.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

LOADING = ("read", "vitkern.load", "vitkern.load bf16", "vitkern.load hf_vit", "load_state_dict")
PACKED = ("fp32", "bf16", "int8")
PACKING = tuple(f"{way} {p}" for p in PACKED for way in ("load and pack", "load packed"))
WAYS = (*LOADING, *PACKING)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="L/16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help="where the file is kept between calls")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measured(given.way, given.model, given.folder)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or pathlib.Path(scratch)
        size = written(given.model, folder)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in given.ways}
        command = [sys.executable, "-m", "tools.loading_cost", "--model", given.model]
        for _ in range(given.runs):
            for way in given.ways:
                call = [*command, "--way", way, "--folder", str(folder)]
                rows[way].append(json.loads(subprocess.check_output(call)))
    print(f"{given.model}: {size / 2**20:.0f} MiB, medians of {given.runs}\n")
    print("| way | ms | x reading | own MiB | peak MiB |\n|---|--:|--:|--:|--:|")
    middle = {
        way: {key: statistics.median(row[key] for row in found) for key in found[0]}
        for way, found in rows.items()
    }
    for way, row in middle.items():
        ratio = f"{row['ms'] / middle['read']['ms']:.2f}" if "read" in middle else ""
        print(f"| {way} | {row['ms']:.0f} | {ratio} | {row['own']:.0f} | {row['peak']:.0f} |")
    return 0


def written(model: str, folder: pathlib.Path) -> int:
    """Random weights in timm's and Hugging Face's layouts and packed, once."""
    import vitkern

    path = folder / "model.safetensors"
    if not path.exists():
        made = vitkern.ViT(model)
        vitkern.save(made, path)
        vitkern.save(made, folder / "hf", "hf_vit")
        for precision in PACKED:
            made.save_packed(folder / f"{precision}.safetensors", precision)
    for file in folder.rglob("*.safetensors"):
        file.read_bytes()  # into the page cache
    return path.stat().st_size


def measured(way: str, model: str, folder: pathlib.Path) -> dict[str, float]:
    import safetensors.torch
    import torch

    import vitkern

    path = folder / "model.safetensors"
    before = memory()
    start = time.perf_counter()
    if way == "read":
        kept: object = path.read_bytes()
    elif way == "load_state_dict":
        kept = vitkern.ViT(model)
        kept.load_state_dict(safetensors.torch.load_file(path))
    elif way in PACKING:
        precision = way.split()[-1]
        packed = vitkern.load(folder / f"{precision}.safetensors" if "packed" in way else path)
        packed.engines.structure()
        packed.engines.ready(precision)
        kept = packed
    elif way == "vitkern.load hf_vit":
        kept = vitkern.load(folder / "hf")
    else:
        kept = vitkern.load(path, dtype=torch.bfloat16 if way.endswith("bf16") else None)
    took = time.perf_counter() - start
    after = memory()
    del kept
    return {
        "ms": took * 1000,
        "own": after["RssAnon"] - before["RssAnon"],
        "peak": after["peak"] - before["RssAnon"] - before["RssFile"],
    }


def memory() -> dict[str, float]:
    """MiB of this process by kind, and its peak (Linux)."""
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = {key: int(rows[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile")}
    return {**found, "peak": int(rows["VmHWM"].split()[0]) / 1024}


if __name__ == "__main__":
    sys.exit(main())
