"""Launches and bytes of the GPU engine: the counts in docs/gpu.md are those of the present code."""

import re

import pytest
import torch

pytest.importorskip("triton")
from tools import gpu_traffic
from vitkern.gpu import layernorm
from vitkern.gpu.launch import Recorder, executing


def test_each_tensor_of_a_launch_counts_once():
    x, weight = torch.empty(10, 64, device="meta"), torch.empty(64, device="meta")
    recorder = Recorder("sm_80")
    with executing(recorder):
        layernorm.normalise(x[:, :32], weight[:32], None, torch.empty_like(x[:, :32]), 1e-6)
    assert gpu_traffic.of_launches(recorder.launches) == (1, (10 * 32 + 32) * 4, 10 * 32 * 4)


def test_repeated_rows_are_read_once():
    assert gpu_traffic.touched(torch.empty(7).expand(5, 7)) == 28
    assert gpu_traffic.touched(torch.empty(0, 7)) == 0


def test_the_page_has_the_present_counts(capsys):
    status = gpu_traffic.main(["--check"])
    said = capsys.readouterr().out
    assert status == 0, f"run python -m tools.gpu_traffic\n{said}"
    rows = re.findall(r"\| (.+?) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|", said)
    assert rows
    for name, ours, eager, moved, eager_moved in rows:
        if name.startswith("forward"):
            assert int(ours) <= 87
        assert int(ours) < int(eager), name
        assert int(moved.replace(",", "")) < int(eager_moved.replace(",", "")), name
