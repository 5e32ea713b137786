"""Draws results files and puts their tables into README.md and docs/performance.md.

python -m benchmarks.report [RESULTS ...] [--check]
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from benchmarks import agreement, pictures, roofline, sweeps, tables
from benchmarks.cpu import results
from benchmarks.cpu import tables as cpu_tables
from benchmarks.gpu import tables as gpu
from benchmarks.rows import CUDA, LATEST, ROOT, SCALING, read
from benchmarks.training import tables as training

README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
GPU_PAGE, TRAINING = ROOT / "docs" / "gpu.md", ROOT / "docs" / "training.md"


def between(text: str, name: str, body: str, path: pathlib.Path) -> str:
    """`text` with what stands between the markers of `name` replaced by `body`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in text or end not in text:
        raise ValueError(
            f"{path} lacks the markers {begin} and {end}: put them where the table belongs"
        )
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"


def documents(rows: list[dict], gpu_rows: list[dict] | None = None) -> dict[pathlib.Path, str]:
    """What README.md and docs/performance.md should say of these rows, of the peers' and a GPU's.

    The peers' are those of every class of CPUs that has a results file. A GPU's are by default
    those of its own; without one the documents say that its speed is unmeasured.
    """
    measured = results.all_published()
    readme = between(README.read_text(), "peers", cpu_tables.summary(measured), README)
    text = between(PERFORMANCE.read_text(), "peers", cpu_tables.text(measured), PERFORMANCE)
    text = between(text, "agreement", agreement.text(agreement.all_published()), PERFORMANCE)
    text = between(text, "results", tables.models(rows), PERFORMANCE)
    text = between(text, "operators", tables.operators(rows), PERFORMANCE)
    text = between(text, "roofline", roofline.text(rows), PERFORMANCE)
    text = between(text, "scaling", sweeps.text(rows), PERFORMANCE)
    text = between(text, "memory", sweeps.memory_text(rows), PERFORMANCE)
    return gpu_documents({README: readme, PERFORMANCE: text, **training_documents()}, gpu_rows)


def training_documents() -> dict[pathlib.Path, str]:
    """docs/training.md with the steps of every class of CPUs that has a results file."""
    body = training.text(training.all_published())
    return {TRAINING: between(TRAINING.read_text(), "training", body, TRAINING)}


def gpu_documents(
    texts: dict[pathlib.Path, str], gpu_rows: list[dict] | None
) -> dict[pathlib.Path, str]:
    """The same with a GPU's tables between the markers of "gpu", in each page that has them."""
    if gpu_rows is None:
        gpu_rows = read(CUDA) if CUDA.is_file() else []
    pages = {README: gpu.summary, PERFORMANCE: gpu.text, GPU_PAGE: gpu.text}
    for path, write in pages.items():
        text = texts.get(path) or (path.read_text() if path.is_file() else "")
        if "<!-- gpu:begin -->" in text:
            texts[path] = between(text, "gpu", write(gpu_rows), path)
    return texts


def published() -> list[pathlib.Path]:
    """The results files that the documents show."""
    return [LATEST, *([SCALING] if SCALING.is_file() else [])]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=pathlib.Path,
        help=f"default: {LATEST.name}, {SCALING.name} and {CUDA.name}, as far as they exist",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a table is not current"
    )
    parser.add_argument(
        "--pictures",
        type=pathlib.Path,
        metavar="FOLDER",
        help="draw there and leave the documents alone",
    )
    given = parser.parse_args(arguments)
    try:
        given.results = given.results or [*published(), *([CUDA] if CUDA.is_file() else [])]
        rows = [row for path in given.results for row in read(path)]
        if given.pictures:
            for path in pictures.draw(rows, given.pictures):
                print(f"drew {path}")
            return 0
        ours = [row for row in rows if not gpu.is_gpu(row)]
        others = [row for row in rows if gpu.is_gpu(row)] or None
        wanted = documents(ours, others) if ours else gpu_documents({}, others)
    except (OSError, ValueError, ImportError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    files = " and ".join(str(path) for path in given.results)
    old = [path for path, text in wanted.items() if path.read_text() != text]
    if given.check:
        for path in old:
            print(
                f"{path.relative_to(ROOT)} does not show {files}: run python -m benchmarks.report"
            )
        return 1 if old else 0
    for path, text in wanted.items():
        path.write_text(text)
    for path in pictures.draw(rows, ROOT / "docs" / "pictures"):
        print(f"drew {path.relative_to(ROOT)}")
    print(f"tables of {files} are in README.md and docs/performance.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
