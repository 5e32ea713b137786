"""What this machine is: the facts that stand beside every measurement."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OLDEST_CAPABILITY = (8, 0)  # of NVIDIA's devices: bf16 and asynchronous copies begin there
# what nvidia-smi calls it -> what a results file calls it
SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "highest_sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.limit": "power_limit_w",
}


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
    if "device" in machine:
        with_driver = f", driver {machine['driver']}" if "driver" in machine else ""
        return (
            f"{machine['device']} ({machine['capability']}){with_driver}, {machine['runtime']},"
            f" torch {machine['torch']}, triton {machine['triton']}"
        )
    threads = f"{machine['threads']} threads"
    return f"{machine['cpu']}, {threads}, {machine['isa']}, torch {machine['torch']}"


def find_gpu(name: str) -> torch.device:
    """The GPU called "cuda" or "cuda:1" (AMD's too); a ValueError in one line where it is not."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type != "cuda":
        raise ValueError(f"--device {name}: give cpu, cuda or cuda:N (the same names on ROCm)")
    if not (torch.version.cuda or torch.version.hip):
        raise ValueError(
            f"--device {name}: this PyTorch ({torch.__version__}) is built for the CPU only;"
            f" install its CUDA or ROCm build"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= (device.index or 0):
        seen = f"{count} GPUs are" if count else "no GPU is"
        raise ValueError(
            f"--device {name}: {seen} visible to PyTorch; see nvidia-smi or rocm-smi, and"
            f" CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", device.index or 0)
    capability = torch.cuda.get_device_capability(device)
    if not torch.version.hip and capability < OLDEST_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, OLDEST_CAPABILITY))
        raise ValueError(
            f"--device {name}: {torch.cuda.get_device_name(device)} has compute capability {have},"
            f" the kernels need {need}"
        )
    return device


def describe_gpu(properties: Any) -> dict[str, object]:
    """Device, driver, versions and clocks beside the machine's own facts; what is unknown is not
    there. `properties` are torch.cuda.get_device_properties'."""
    import torch

    amd = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    found = {
        **describe(),
        "device": properties.name,
        "capability": amd.split(":")[0] or f"sm_{properties.major}{properties.minor}",
        "runtime": f"ROCm {torch.version.hip}" if amd else f"CUDA {torch.version.cuda}",
        "triton": _triton_version(),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }
    said = _amd_driver() if amd else ask_nvidia_smi(str(getattr(properties, "uuid", "")))
    if "driver" in said:
        found["driver"] = said.pop("driver")
    return {**found, "clocks": said} if said else found


def ask_nvidia_smi(uuid: str) -> dict[str, object]:
    """The driver's version and the clocks now, of the GPU with this UUID; {} where it is silent."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}"]
    command += ["--format=csv,noheader,nounits", *(["-i", f"GPU-{uuid}"] if uuid else [])]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    cells = said.stdout.strip().split("\n")[0].split(", ")
    if said.returncode != 0 or len(cells) != len(SMI_FIELDS):
        return {}
    found: dict[str, object] = {}
    for name, cell in zip(SMI_FIELDS.values(), cells, strict=True):
        if name == "driver":
            found[name] = cell
        elif cell.replace(".", "", 1).isdigit():  # "[N/A]" where the device does not tell
            found[name] = float(cell)
    return found


def _amd_driver() -> dict[str, object]:
    try:
        return {"driver": pathlib.Path("/sys/module/amdgpu/version").read_text().strip()}
    except OSError:  # the kernel's own driver has no version but the kernel's
        return {"driver": f"Linux {platform.release()}"}


def _triton_version() -> str:
    import importlib.metadata

    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def torch_runs_bf16() -> bool:
    """Whether PyTorch's bf16 matmul works: a child process tries one, which may die of SIGILL."""
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def let_torch_run_bf16() -> str:
    """Keep PyTorch's bf16 matmul from killing the process; what had to be done, or "".

    Virtual machines that advertise AMX and hide CPUID leaf 0x1D make oneDNN die with SIGILL. Where
    it does, oneDNN is held below AMX here. It reads the variable at its first use, not at import.
    """
    if "amx_bf16" not in _cpu_flags() or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return ""
    if torch_runs_bf16():
        return ""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return "PyTorch's AMX path crashes here: it runs with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"


def _cpu_flags() -> set[str]:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}
