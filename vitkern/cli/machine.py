"""What this machine is: the facts that stand beside every measured number."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys


def cpu_name() -> str:
    """The processor's own name, or the architecture where the system does not tell."""
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        said = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        )
        if said.returncode == 0 and said.stdout.strip():
            return said.stdout.strip()
    return platform.processor() or platform.machine()


def features() -> dict[str, object]:
    """What the native extension sees of this CPU; empty where it is not built."""
    try:
        from .. import _C
    except ImportError:
        return {}
    return dict(_C.features())


def describe() -> dict[str, object]:
    """CPU, instruction set in use, threads and versions, as plain values."""
    import torch

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "isa": features().get("isa", "none: the native extension is not built"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def one_line(machine: dict[str, object]) -> str:
    """The short form for titles and table captions."""
    threads = f"{machine['threads']} threads"
    return f"{machine['cpu']}, {threads}, {machine['isa']}, torch {machine['torch']}"


def let_torch_run_bf16() -> str:
    """Keep PyTorch's bf16 matmul from killing the process; what had to be done, or "".

    Virtual machines that advertise AMX and hide CPUID leaf 0x1D make oneDNN die with SIGILL. A
    child process tries one matmul; if it dies, oneDNN is held below AMX here. oneDNN reads the
    variable at its first use, not at import.
    """
    if "amx_bf16" not in _cpu_flags() or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return ""
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0:
        return ""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return "PyTorch's AMX path crashes here: it runs with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"


def _cpu_flags() -> set[str]:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}
