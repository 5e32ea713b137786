"""Which Triton the kernels need: an older one counts as none, so that references run in its place.

Whoever imports a kernel imports `launch`, which calls `require`. The ImportError names "triton", as
that of a missing Triton does: operators and engine fall back, and `explain()` gives the reason.
"""

from __future__ import annotations

import re

# Kernels take tuples with None among them, and join constants by `and`: 3.2 (of torch 2.6) and 3.3
# (of torch 2.7) compile neither.
OLDEST = (3, 4)
NEEDED = "Triton 3.4 or newer (torch 2.8 and newer bring one)"


def require(version: str) -> None:
    """Raise ImportError unless a Triton of this version ("3.4.0+git123") compiles the kernels."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        raise ImportError(f"the GPU kernels need {NEEDED}, this is {version}", name="triton")
