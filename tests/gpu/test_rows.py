"""The gates on machine code see every row of the launch table, whoever asks for it."""

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton")
from vitkern.gpu import configs

DAILY = ("sm_90",)
ARCHS = [
    arch if arch in DAILY else pytest.param(arch, marks=pytest.mark.full) for arch in configs.ARCHS
]


def is_shadowed(rows, n, arch, bits):
    """Whether an earlier row serves all that this one would: it is for other architectures."""
    return any(
        arch in row.archs
        and bits in row.bits
        and all(rows[n].upto.get(axis, float("inf")) <= limit for axis, limit in row.upto.items())
        for row in rows[:n]
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_is_put_to_use(arch, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import gpu_rows

    picked, pick = set(), configs.pick

    def noting(kernel, arch, bits, **sizes):
        row = pick(kernel, arch, bits, **sizes)
        picked.add((kernel, configs.TABLE[kernel].index(row)))
        return row

    monkeypatch.setattr(configs, "pick", noting)
    assert gpu_rows.variants(arch)
    wanted = {
        (kernel, n)
        for kernel, rows in configs.TABLE.items()
        for n, row in enumerate(rows)
        if arch in row.archs and not all(is_shadowed(rows, n, arch, bits) for bits in row.bits)
    }
    assert not wanted - picked
