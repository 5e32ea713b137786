"""What a kernel's source asks for, read from Triton's first IR: matmuls and accesses of tiles.

The machine code is held against it: so many flops and bytes a trip have to be there, by tensor
instructions and by accesses of 128 bits. Only tiles count (two axes longer than 1) that have 128
bits for every thread: vectors and small tiles are spread over the threads by narrower accesses.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FOR = re.compile(r"(\s*).*\bscf\.for\b")
_DOT = re.compile(
    r"tt\.dot .*?(?:inputPrecision = (\w+) )?: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x"
)
_ACCESS = re.compile(r"tt\.(load|store) .*: tensor<([\dx]+)x!tt\.ptr<(\w+)>>")
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "i1": 1}


class Asked(NamedTuple):
    """Of one block; a trip is one of the loop with the most matmuls, or the whole kernel."""

    dots: int = 0  # matmuls that tensor cores can do, in the text
    flops: int = 0  # of these matmuls, per trip
    loads: int = 0  # bytes of tiles, per trip
    stores: int = 0  # bytes of tiles, in all


class _Scope:
    """The kernel itself (indent -1) or a loop of it."""

    def __init__(self, indent: int) -> None:
        self.indent, self.flops, self.loads, self.holds_loop = indent, 0, 0, False


def asked(ttir: str, arch: str, threads: int) -> Asked:
    """Read the text of Triton's first IR; `threads` are those of a block."""
    scopes = [_Scope(-1)]
    loops: list[_Scope] = []
    dots = stores = 0
    for line in ttir.splitlines():
        while len(scopes) > 1 and line.startswith(" " * scopes[-1].indent + "}"):
            scopes.pop()
        if found := _FOR.match(line):
            scopes.append(_Scope(len(found[1])))
            loops.append(scopes[-1])
        elif found := _DOT.search(line):
            precision, m, k, kind, n = found.groups()
            if kind == "f32" and precision not in ("tf32", "tf32x3") and arch.startswith("sm_"):
                continue  # plain fp32, which tensor cores do not multiply
            terms = 3 if precision == "tf32x3" else 1
            dots += 1
            for scope in scopes:
                scope.flops += 2 * int(m) * int(n) * int(k) * terms
            for scope in scopes[:-1]:
                scope.holds_loop = True  # with a matmul in it
        elif found := _ACCESS.search(line):
            sides = [int(side) for side in found[2].split("x")]
            size = _BYTES.get(found[3], 4)
            for side in sides:
                size *= side
            if sum(side > 1 for side in sides) < 2 or size < 16 * threads:
                continue
            if found[1] == "store":
                stores += size
            else:
                for scope in scopes:
                    scope.loads += size
    inner = [loop for loop in loops if loop.flops and not loop.holds_loop]
    trip = max(inner, key=lambda loop: loop.flops, default=scopes[0])
    return Asked(dots, trip.flops, trip.loads, stores)
