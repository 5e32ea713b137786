"""The table of docs/checkpoints.md: each layout loaded, compared with its library, written back.

    python -m tools.checkpoint_table            print it
    python -m tools.checkpoint_table --write    put it into docs/checkpoints.md

The models are those of the tests (tests/layouts): random weights, two blocks of width 64. A
difference is the largest between the two results, in units of the other's rms, in the same dtype.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import pathlib
import sys
import tempfile

import torch

import vitkern
from tests.layouts.foreign_models import CASES, Case
from vitkern.weights.layouts import BY_NAME

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- table: python -m tools.checkpoint_table --write -->", "<!-- end of table -->"
HEAD = "| layout | checkpoint | loads | exports | fp32 | bf16 |\n|---|---|---|---|--:|--:|"
REFUSED = (
    (
        "hf_dinov2",
        "DINOv2 with its classifier",
        "needs its head, of class token and patches' mean; `classes=0` loads the rest",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    given = parser.parse_args()
    table = "\n".join([HEAD, *(row(name, case) for name, case in CASES.items())])
    for layout, what, why in REFUSED:
        table += f"\n| {BY_NAME[layout].title} | {what} | refused: {why} | | | |"
    if not given.write:
        print(table)
        return 0
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return 0


def row(name: str, case: Case) -> str:
    title = BY_NAME[case.layout].title
    if case.library and importlib.util.find_spec(case.library) is None:
        return f"| {title} | {name} | {case.library} is not installed | | | |"
    with tempfile.TemporaryDirectory() as folder:
        theirs = case.make()
        path = case.write(theirs, pathlib.Path(folder))
        found = [difference(case, theirs, path, dtype) for dtype in (torch.float32, torch.bfloat16)]
        exports = exported(case, path, pathlib.Path(folder))
    return f"| {title} | {name} | yes | {exports} | {found[0]:.1e} | {found[1]:.1e} |"


@torch.no_grad()
def difference(
    case: Case, theirs: torch.nn.Module, path: pathlib.Path, dtype: torch.dtype
) -> float:
    image = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = case.ask(copy.deepcopy(theirs).to(dtype), image).double()
    got = vitkern.load(path, dtype=dtype, **case.options)(image).double()
    return ((got - wanted).abs().max() / wanted.square().mean().sqrt()).item()


def exported(case: Case, path: pathlib.Path, folder: pathlib.Path) -> str:
    """Whether what is written loads again with the same bits."""
    if not case.export:
        return "as timm"
    model = vitkern.load(path, **case.options)
    ends = (
        "" if case.export.startswith("hf_") else ".npz" if case.export == "jax" else ".safetensors"
    )
    vitkern.save(model, folder / f"again{ends}", case.export)
    again = vitkern.load(folder / f"again{ends}", **case.options).state_dict()
    same = all(torch.equal(t, again[n]) for n, t in model.state_dict().items())
    return f"`{case.export}`" if same else "differs"


if __name__ == "__main__":
    sys.exit(main())
