"""Panels of packed weights as tensors: the weight (N, K) that they hold, whoever packed them.

C++ packs for the instruction set that runs, and unpacks nothing else. A file may hold the panels of
another machine: here they are unpacked by views, on any. The forms are those of csrc/cpu:

    floats    [columns of a panel]: [K][columns]                     tiles_fma.hpp
    integers  [columns][steps of a block]: [pairs of steps][columns][2], then [columns] scales
                                                                     tiles_int16.hpp
    terms     [columns][steps][term][2 halves of the columns][pairs of steps][columns / 2][2]
                                                                     terms_amx.hpp
    halves    [columns of a panel]: terms in fp16, then [3][columns] scales, their inverses, norms
                                                                     terms_amx.hpp
    pairs     [columns]: [pairs of steps][columns][2], in bf16       tiles_bf16.hpp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("floats", "integers", "terms", "halves", "pairs")


class Form(NamedTuple):
    """How the elements of panels lie: `_C.panel_form` of a layout."""

    kind: str
    columns: int  # of a panel: rows of the weight
    steps: int  # of K in a block of integers, a tile of terms or a pair, else 1
    terms: int  # whose sum is an element

    @classmethod
    def parsed(cls, fields: object) -> Form:
        """What a file says, or a ValueError: numbers so small that no size overflows."""
        if isinstance(fields, Sequence) and len(fields) == 4 and fields[0] in KINDS:
            numbers = fields[1:]
            if all(type(n) is int and 0 < n <= 4096 for n in numbers):
                form = cls(*fields)
                if form.kind == "floats" or not (form.columns % 2 or form.steps % 2):
                    return form
        raise ValueError(f"no panels have the form {fields!r:.80}")

    def __str__(self) -> str:
        what = {
            "floats": "floats",
            "integers": f"16-bit integers in blocks of {self.steps}",
            "terms": f"{self.terms} bf16 term{'s' * (self.terms > 1)}",
            "halves": f"{self.terms} scaled fp16 term{'s' * (self.terms > 1)}",
            "pairs": "pairs of bf16",
        }
        return f"{what[self.kind]}, {self.columns} columns"

    def bytes(self, N: int, K: int) -> int:
        """Size of the panels of a weight (N, K)."""
        panels = -(-N // self.columns)
        if self.kind == "floats":
            return panels * self.columns * K * 4
        blocks = panels * -(-K // self.steps)
        if self.kind == "integers":
            return blocks * self.columns * (2 * self.steps + 4)
        scales = panels * 3 * self.columns * 4 if self.kind == "halves" else 0
        return blocks * self.columns * self.steps * 2 * self.terms + scales

    def floats(self, panels: Tensor, N: int) -> list[Tensor]:
        """Of panels of N rows as int32: what is floating-point numbers, any of which may be NaN."""
        if self.kind == "integers":
            return [self._blocks(panels)[:, self.steps * self.columns // 2 :].view(torch.float32)]
        if self.kind == "halves":
            each, scales = panels.view(-(-N // self.columns), -1), 3 * self.columns
            return [
                each[:, :-scales].contiguous().view(torch.float16),
                each[:, -scales:].contiguous().view(torch.float32),
            ]
        return [panels.view(torch.float32 if self.kind == "floats" else torch.bfloat16)]

    def unpacked(self, panels: Tensor, N: int, K: int) -> Tensor:
        """The weight (N, K) in float32, of panels as int32."""
        count = -(-N // self.columns)
        numbers, *scales = self.floats(panels, N)
        if self.kind == "floats":
            rows = numbers.view(count, K, self.columns).transpose(1, 2)
        elif self.kind == "integers":
            blocks = self._blocks(panels)
            integers = blocks[:, : self.steps * self.columns // 2].contiguous().view(torch.int16)
            integers = integers.view(count, -1, self.steps // 2, self.columns, 2)
            rows = (integers * numbers.view(count, -1, 1, self.columns, 1)).permute(0, 3, 1, 2, 4)
        elif self.kind == "pairs":
            rows = numbers.view(count, -1, self.columns, 2).transpose(1, 2).float()
        else:
            half = self.columns // 2
            tiles = numbers.view(
                count, -1, self.terms, 2, self.steps // 2, half, 2
            )  # (panel, tile of steps, term, half, pair of steps, column, 2)
            total = tiles[:, :, 0].float()
            for term in range(1, self.terms):
                total = total + tiles[:, :, term]
            rows = total.permute(0, 2, 4, 1, 3, 5)
            if scales:
                inverse = scales[0].view(count, 3, 2, half, 1, 1, 1)[:, 1]
                rows = rows * inverse
        return rows.reshape(count * self.columns, -1)[:N, :K].contiguous()

    def _blocks(self, panels: Tensor) -> Tensor:
        return panels.view(-1, self.columns * (self.steps // 2 + 1))
