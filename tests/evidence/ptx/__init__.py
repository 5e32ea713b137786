"""An emulator of PTX, as far as Triton's code needs it: the compiler's output on a CPU.

For sm_80, 86, 89, 90 and 120; what sm_100 has beyond them (tcgen05, tensor memory, mbarriers) is
not emulated. Written from NVIDIA's PTX ISA manual. `run_ptx` runs a kernel on host memory;
`PtxExecutor` runs any operator of vitkern. What it finds that a GPU would not tell: reads of memory
that nobody wrote, accesses outside the tensors of a launch or to tensors that it does not declare
as written, missing waits, fences and barriers, results that depend on the order of threads or
blocks. What it does not know: time, the rounding inside the tensor cores (matrix.py) and of the
approximate functions (floating.py), and what ptxas makes of the PTX.
"""

from . import convert, floating, integer, matrix, memory, proxy, shared, warp, warpgroup  # noqa: F401
from .executor import PtxExecutor, run_ptx
from .parser import PtxError

__all__ = ["PtxError", "PtxExecutor", "run_ptx"]
