"""Every row of the operator table at its benchmark shapes, in turns with eager PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

import vitkern.ops  # noqa: F401  fills REGISTRY
from benchmarks.peers import eager
from benchmarks.rows import shape_text
from vitkern.registry import REGISTRY

KIND = "op"
DTYPES = (torch.float32, torch.bfloat16)


def cases(quick: bool) -> list:
    """(row of the table, axes, dtype); quick keeps each operator's smallest shape in fp32."""
    found = []
    for spec in REGISTRY.values():
        shapes = sorted(spec.bench, key=lambda axes: math.prod(axes.values()))
        for axes in shapes[:1] if quick else shapes:
            for dtype in DTYPES[:1] if quick else DTYPES:
                name = f"{spec.name}-{shape_text(axes).replace(' ', '_')}-{str(dtype)[6:]}"
                found.append(pytest.param((spec, axes, dtype), id=name))
    return found


def test_operator(case, compare) -> None:
    spec, axes, dtype = case
    arguments = spec.arguments(spec.make_inputs(axes, dtype))
    native = spec.torch_op()
    compare(
        {**eager(spec, arguments), "native": lambda: native(*arguments)},
        spec.name,
        axes,
        str(dtype)[6:],
        flops=spec.flops(spec.sizes(axes)),
        bytes_moved=spec.bytes_moved(axes, dtype.itemsize),
    )
