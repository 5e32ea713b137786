"""Settings every test needs before torch is imported, and the data that only some machines have."""

import os
import pathlib

# PyTorch's bf16 matmul dies with SIGILL on virtual machines that advertise AMX but hide CPUID leaf
# 0x1D.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Waiting threads sleep instead of spinning: 8 times less time for small models on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Real weights and photographs, which the repository may not carry: $VITKERN_DATA."""
    folder = pathlib.Path(os.environ.get("VITKERN_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}: set VITKERN_DATA to run this test")
    return folder


@pytest.fixture(autouse=True)
def seeded():
    """Numbers that a test draws are the same in every run and in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture
def fake():
    """The stand-in CUDA driver: one device of sm_80, and no memory of other tests."""
    from tests.evidence.fake_cuda import fake_cuda

    fake_cuda().reset()
    return fake_cuda()
