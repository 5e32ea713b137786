"""Turn images into vectors, by the thousand: one file for search, clustering or a classifier.

IMAGE is a file, a folder (searched through) or a pattern in quotes. Without --weights the package's
small model computes. Images are decoded by threads beside the kernels. After a kill the same
command goes on where it was; images that cannot be read are left out and listed.

  vitkern embed photos/ -o vectors.parquet
  vitkern embed photos/ "more/*.jpg" -o vectors.npy --weights deit_tiny.safetensors --tokens mean

Status: 0 all images are in the file, 1 some were left out, 2 there is no file, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import TYPE_CHECKING

from ..image_files import NORMALISATIONS

if TYPE_CHECKING:
    from ..embedding import Report

PRECISIONS = ("fp32", "tf32", "bf16", "int8")
TOKENS = ("cls", "mean", "all")
BATCH = 32
SHOWN = 5  # of the images that were left out
SECONDS_BETWEEN_LINES = 2  # of JSON


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument(
        "-o", "--out", type=pathlib.Path, required=True, metavar="FILE",
        help="the vectors: .parquet (needs pyarrow), .npy or .safetensors",
    )  # fmt: skip
    parser.add_argument("--weights", metavar="FILE", help="what vitkern.load reads (the own model)")
    parser.add_argument("--model", metavar="NAME", help="the variant, where tensors do not tell")
    parser.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="positions are resized (the weights' own)"
    )
    parser.add_argument(
        "--tokens", choices=TOKENS, help="the vector of an image (what the model itself pools)"
    )
    parser.add_argument("--normalise", action="store_true", help="vectors of length 1")
    parser.add_argument(
        "--normalisation", choices=tuple(NORMALISATIONS), help="mean and std (the model's own)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="of matmuls (fp32)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    parser.add_argument(
        "--batch", type=int, default=BATCH, metavar="B", help=f"images a call (default {BATCH})"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="threads that decode (one a CPU, 8 at most)"
    )
    parser.add_argument(
        "--where", choices=("local", "ray"), default="local",
        help="ray: on the cluster that RAY_ADDRESS names, or on one of this machine",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first image that cannot be read"
    )
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="JSON",
        help="where images that were left out are listed, with reasons (FILE.skipped.json)",
    )  # fmt: skip
    parser.add_argument(
        "--restart", action="store_true", help="throw away what is there, and start afresh"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(given: argparse.Namespace) -> int:
    if given.batch < 1:
        raise ValueError(f"--batch {given.batch}: a call takes at least one image")
    if given.workers is not None and given.workers < 1:
        raise ValueError(f"--workers {given.workers}: at least one thread decodes")
    from ..embedding import Encoder, embed
    from ..measure.progress import Progress

    def encoder() -> Encoder:
        return Encoder.open(
            given.weights, model=given.model, image_size=given.image_size, tokens=given.tokens,
            precision=given.precision, normalise=given.normalise,
            normalisation=given.normalisation, device=given.device,
        )  # fmt: skip

    lines = JsonLines() if given.json else None
    with Progress("images") as bar:

        def progress(report: Report) -> None:
            if lines is not None:
                lines(report)
                return
            if bar.already is None:
                bar.already = report.resumed
            bar(report.done, report.images, f"{report.waiting_share:.0%} waiting for decoding")

        try:
            report = embed(
                given.images, given.out, encoder, batch=given.batch, workers=given.workers,
                strict=given.strict, restart=given.restart, skipped=given.report,
                progress=progress, where=given.where,
            )  # fmt: skip
        except KeyboardInterrupt:
            print("vitkern embed: interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    if given.json:
        print(json.dumps({"event": "done", **report.as_json()}))
    else:
        _print(report)
    return 0 if report.embedded == report.images else 1


class JsonLines:
    """A line of JSON now and then, for programs that watch."""

    def __init__(self) -> None:
        self.said = time.perf_counter()

    def __call__(self, report: Report) -> None:
        now = time.perf_counter()
        if now - self.said < SECONDS_BETWEEN_LINES:
            return
        self.said = now
        pace = report.images_per_second
        line = {
            "event": "progress", "done": report.done, "images": report.images,
            "images_per_second": round(pace, 2), "waiting_share": round(report.waiting_share, 4),
            "seconds_left": round((report.images - report.done) / pace, 1) if pace else None,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def _print(report: Report) -> None:
    from ..image_sources import printable

    if report.resumed == report.images and not report.computing:
        print(f"{report.out}: complete already, with {report.embedded:,} vectors")
    else:
        shape = " x ".join(map(str, report.shape))
        size = pathlib.Path(report.out).stat().st_size
        large = f"{size / 1e6:,.1f} MB" if size > 1e6 else f"{size / 1e3:,.1f} kB"
        print(f"{report.out}: {report.embedded:,} vectors of {shape}, {large}")
    if report.done > report.resumed:
        kept = f" ({report.resumed:,} were done before)" if report.resumed else ""
        threads = f"{report.workers} thread{'s' if report.workers > 1 else ''}"
        print(
            f"{report.done - report.resumed:,} images in {report.seconds:.1f} s{kept}:"
            f" {report.images_per_second:,.0f}/s; decoded at {report.decoded_per_second:,.0f}/s by"
            f" {threads}, computed at {report.computed_per_second:,.0f}/s;"
            f" {report.waiting_share:.1%} of the time lost waiting for decoding"
        )
    left_out = report.images - report.embedded
    if left_out:
        print(f"{left_out:,} image{'s' if left_out > 1 else ''} left out:", file=sys.stderr)
        for one in report.skipped[:SHOWN]:
            print(f"  {printable(one['image'])}: {printable(one['reason'])}", file=sys.stderr)
        if left_out > SHOWN:
            print(f"  and {left_out - SHOWN:,} more", file=sys.stderr)
