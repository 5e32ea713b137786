"""What a device could do at most: from its properties where they tell, and measured with PyTorch.

A peak is (multiprocessors) x (highest clock) x (flops per clock of one multiprocessor); the last
factor is the architecture's, from NVIDIA's and AMD's architecture papers, for dense matmuls that
are summed in fp32. A device that is not in the table has no peak: shares of it are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.device import Device, computing_in
from vitkern.precision import PRECISIONS

# architecture -> flops per clock of one multiprocessor: (16-bit matmuls, TF32 matmuls, fp32 FMA)
FLOPS_PER_CLOCK = {
    "sm_80": (2048, 1024, 128),  # A100: 108 x 1.41 GHz x 2048 = 312 TFLOPS
    "sm_86": (1024, 512, 256),  # RTX A6000: 84 x 1.80 GHz x 1024 = 155
    "sm_89": (1024, 512, 256),  # L40S: 142 x 2.52 GHz x 1024 = 366
    "sm_90": (4096, 2048, 256),  # H100 SXM: 132 x 1.83 GHz x 4096 = 989
    "sm_100": (8192, 4096, 256),  # B200: 148 x 1.85 GHz x 8192 = 2243
    "sm_120": (1024, 512, 256),  # RTX PRO 6000 Blackwell: 188 x 2.62 GHz x 1024 = 504
    "gfx942": (2048, 1024, 256),  # MI300X: 304 x 2.1 GHz x 2048 = 1307
}
# GeForce cards sum 16-bit matmuls in fp32 at half the rate of the same chip's other cards:
# RTX 3090 82 x 1.70 GHz x 512 = 71, RTX 4090 128 x 2.52 GHz x 512 = 165.
GEFORCE = {"sm_86": (512, 256, 256), "sm_89": (512, 256, 256), "sm_120": (512, 256, 256)}

MATMUL_SIZES = (2048, 4096, 8192)
COPIED_BYTES = 512 << 20  # read and written: past every L2


def peaks(properties: Any, facts: Mapping[str, Any]) -> dict[str, object]:
    """{"peak_gflops": {precision: rate}, "peak_gbs": rate}, each where it is known."""
    found: dict[str, object] = {}
    kind = str(facts["capability"])
    table = GEFORCE if "geforce" in properties.name.lower() else {}
    per_clock = table.get(kind) or FLOPS_PER_CLOCK.get(kind)
    # The highest clock that anybody reports, so that no share can pass 1.
    clocks = facts.get("clocks", {})
    kilohertz = getattr(properties, "clock_rate", 0) or 0
    hertz = max(1e3 * kilohertz, 1e6 * clocks.get("highest_sm_mhz", 0))
    if per_clock and hertz:
        narrow, tf32, fma = (f * hertz * properties.multi_processor_count / 1e9 for f in per_clock)
        # fp32's own precision also comes from three TF32 matmuls, faster than FMA on some.
        rates = {"bf16": narrow, "fp16": narrow, "tf32": tf32, "fp32": max(fma, tf32 / 3)}
        found["peak_gflops"] = {p: round(rate, 1) for p, rate in rates.items()}
    memory = getattr(properties, "memory_clock_rate", 0) or 0  # kHz; two transfers a clock
    bus = getattr(properties, "memory_bus_width", 0) or 0  # bits
    if memory and bus and kind.startswith("sm_"):  # AMD counts its memory's clock otherwise
        found["peak_gbs"] = round(2 * memory * bus / 8 / 1e6, 1)
    return found


def measured(device: Device, precisions: list[str], quick: bool = False) -> dict[str, object]:
    """What PyTorch reaches here: its best matmul at each precision, a copy of a large tensor."""
    found: dict[str, object] = {"matmul_gflops": {}}
    for precision in precisions:
        rates = []
        for n in MATMUL_SIZES[:1] if quick else MATMUL_SIZES:
            try:
                rates.append(_matmul(device, n, precision))
            except RuntimeError as error:
                device.reason(error)  # too large for this device, or the device is lost
            device.free()
        if rates:
            found["matmul_gflops"][precision] = round(max(rates) / 1e9, 1)
    try:
        size = COPIED_BYTES >> (8 if quick else 0)
        a, b = (torch.ones(size // 8, device=device.device) for _ in range(2))
        clock = device.clock(cold=False)
        found["copy_gbs"] = round(
            size / min(clock.time(lambda: b.copy_(a)) for _ in range(9)) / 1e9
        )
    except RuntimeError as error:
        device.reason(error)
    return found


def _matmul(device: Device, n: int, precision: str) -> float:
    """Flops a second of a square matmul of random elements; zeros would draw less power."""
    a, b = (
        torch.randn(n, n, device=device.device).to(PRECISIONS[precision].dtype) for _ in range(2)
    )
    clock = device.clock(cold=False)
    with computing_in(precision):
        return 2 * n**3 / min(clock.time(lambda: a @ b) for _ in range(9))


def row(device: Device, precisions: list[str], quick: bool = False) -> dict[str, object]:
    """A row of the results file, of the kind "limits"."""
    known = peaks(device.properties, device.facts())
    return {"kind": "limits", **known, **measured(device, precisions, quick)}


def shares(gflops: float, gbs: float, precision: str, limits: Mapping[str, Any]) -> dict:
    """A row's part of the device's peaks; only of those that are known."""
    found = {}
    peak = limits.get("peak_gflops", {}).get(precision)
    if peak:
        found["of_peak_flops"] = round(gflops / peak, 4)
    if limits.get("peak_gbs"):
        found["of_peak_gbs"] = round(gbs / limits["peak_gbs"], 4)
    return found
