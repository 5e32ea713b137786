"""Five seconds of the soak, and that it would see what it looks for."""

import torch

from vitkern.engines.base import Engine

from . import soak


def test_threads_share_a_model_whose_weights_change(capsys):
    threads = torch.get_num_threads()
    try:
        work = soak.Soak(seed=1, threads=4)
        assert work.run(5), soak.report(work)
        assert min(work.counts[name] for name in ("forwards", "writes", "lives")) > 0
    finally:
        torch.set_num_threads(threads)


def test_stale_weights_are_seen(monkeypatch):
    work = soak.Soak(seed=1, threads=3)
    monkeypatch.setattr(Engine, "stale", lambda self: False)
    monkeypatch.setattr(work.shared, "unsettle", lambda rng: None)
    assert not work.run(60)
    assert "the writer had added" in work.failures[0]


def test_growing_memory_is_seen():
    flat = [400e6 + 1e6 * (i % 7) for i in range(100)]
    assert not soak.grown(flat)
    assert "memory grew" in soak.grown([size + 1e6 * i for i, size in enumerate(flat)])
    assert "too short" in soak.grown(flat[:3])
