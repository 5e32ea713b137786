"""How fast `vitkern embed` is on many small files, and whether a kill -9 half-way changes its file.

    python -m tools.embed_rate ATLAS [--limit 10000] [--weights FILE] [--precision fp32] [--no-kill]

ATLAS is a picture of 100 x 100 tiles of 32 x 32 pixels, such as CIFAR-10's test images; the tiles
are unpacked as PNG files first. The run is timed; then another one is killed when half of its parts
are written, the same command goes on, and both files are compared byte by byte.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

TILE, ACROSS = 32, 100


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("atlas", type=pathlib.Path)
    parser.add_argument("--limit", type=int, default=ACROSS * ACROSS, metavar="N")
    parser.add_argument("--weights", type=pathlib.Path)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--no-kill", action="store_true", help="only the timed run")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        unpack(given.atlas, folder / "images", given.limit)
        command = [sys.executable, "-m", "vitkern", "embed", str(folder / "images"), "--json"]
        command += ["--precision", given.precision, "--batch", str(given.batch)]
        for name in ("weights", "workers"):
            if getattr(given, name) is not None:
                command += [f"--{name}", str(getattr(given, name))]
        report = embedded(command, folder / "whole.npy")
        print(
            f"{report['images']} images: {report['images_per_second']:,.0f}/s; decoded at"
            f" {report['decoded_per_second']:,.0f}/s by {report['workers']} threads, computed at"
            f" {report['computed_per_second']:,.0f}/s; {report['waiting_share']:.1%} of the time"
            f" lost waiting for decoding"
        )
        if given.no_kill:
            return 0
        killed(command, folder / "v.npy", report["images"])
        again = embedded(command, folder / "v.npy")
        same = (folder / "v.npy").read_bytes() == (folder / "whole.npy").read_bytes()
        print(
            f"killed with {again['resumed']} done, went on with the rest:"
            f" {'the same file' if same else 'ANOTHER FILE'}"
        )
        return 0 if same and 0 < again["resumed"] < again["images"] else 1


def unpack(atlas: pathlib.Path, folder: pathlib.Path, limit: int) -> None:
    """The first tiles of an atlas, row by row, as 00000.png and so on."""
    from PIL import Image

    folder.mkdir()
    with Image.open(atlas) as picture:
        whole = picture.convert("RGB")
    if whole.size != (TILE * ACROSS, TILE * ACROSS):
        raise SystemExit(f"{atlas}: {whole.size} pixels, expected {TILE * ACROSS} each way")
    for i in range(min(limit, ACROSS * ACROSS)):
        x, y = i % ACROSS * TILE, i // ACROSS * TILE
        whole.crop((x, y, x + TILE, y + TILE)).save(folder / f"{i:05}.png")


def embedded(command: list[str], out: pathlib.Path) -> dict:
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def killed(command: list[str], out: pathlib.Path, images: int) -> None:
    """Ends when half of the parts are there."""
    parts = out.with_name(out.name + ".parts")
    half = max(1, images // 1024 // 2)
    process = subprocess.Popen([*command, "-o", str(out)], stdout=subprocess.DEVNULL)
    while len(list(parts.glob("*.npz"))) < half and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
