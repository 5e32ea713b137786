"""The engine's plans: one arena a stream, whatever their number, and threads that share them."""

import sys
import threading

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.interpreter import Interpreter
from tests.model.tiny_models import picture, tiny
from tests.threads import run_together
from vitkern import ViT, ViTConfig
from vitkern.engines.buffers import Arena
from vitkern.engines.gpu import PLANS_KEPT, GpuEngine
from vitkern.gpu import launch, moments


def bytes_of(B):
    """Of the activations of one forward alone."""
    model = tiny()
    engine = GpuEngine(model, "fp32", launch.Recorder("sm_80"))
    engine.logits(picture(model, B=B))
    return engine.activation_bytes


def test_plans_share_the_memory_of_the_largest():
    model = tiny()
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    images = {B: picture(model, B=B) for B in (1, 3, 2)}
    first = {B: engine.logits(image) for B, image in images.items()}
    assert engine.activation_bytes == bytes_of(3) > bytes_of(2) > bytes_of(1)
    assert len(engine.launches) == 2, "the first was made for a smaller arena"
    for B, image in images.items():
        assert torch.equal(engine.logits(image), first[B])
    assert len(engine.launches) == 3 and engine.activation_bytes == bytes_of(3)


def test_streams_have_arenas_of_their_own():
    """Their forwards run at the same time: what one writes the other must not."""
    model, recorder = tiny(), launch.Recorder("sm_80")
    engine = GpuEngine(model, "fp32", recorder)
    image, y = picture(model), torch.empty(5, model.config.classes)

    def written(stream):
        """Addresses between the launches of a plan on a stream."""
        recorder.launches.clear()
        engine._plan("logits", image, y, stream).run(image, y)
        found = [one.arguments[name] for one in recorder.launches for name in one.writes]
        return {t.data_ptr() for t in found if t is not None} - {y.data_ptr()}

    first, second = written(1), written(2)
    assert len(first) > 3 and not first & second
    assert written(1) == first and written(2) == second
    assert engine._arenas[1].lock is not engine._arenas[2].lock


def test_eight_plans_of_a_large_batch_hold_its_activations_once():
    """ViT-B/16 at batch 256 in bf16: 0.8 GB instead of eight times that."""
    model = ViT(ViTConfig.named("B/16", depth=2), device="meta", dtype=torch.bfloat16).eval()
    recorder = launch.Recorder("sm_80")
    engine = GpuEngine(model, "bf16", recorder)
    image = torch.empty(256, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    with launch.executing(recorder):
        needed = Arena(image, engine.sizes(image)).nbytes
    rows, D = 256 * 197, 768
    assert needed == rows * D * 2 * (2 + 3 + 1 + 4) + 2 * rows * (D // moments.WIDTH) * 2 * 4
    assert needed < 0.8e9


def test_threads_share_plans():
    """More shapes than plans are kept: one thread's plans are forgotten while others look."""
    model, failed = tiny(depth=1), []
    engine = GpuEngine(model, "fp32", launch.Recorder("sm_80"))
    images = [picture(model, B=B) for B in range(1, PLANS_KEPT + 4)]

    def work(order):
        try:
            for i in order * 3:
                engine.logits(images[i])
                assert len(engine.launches) <= PLANS_KEPT
        except Exception as error:
            failed.append(error)

    numbers = list(range(len(images)))
    orders = [numbers[i:] + numbers[:i] for i in range(0, len(images), 2)]
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_together(threads)
    finally:
        sys.setswitchinterval(before)
    assert not failed, failed


def test_threads_with_other_shapes_do_not_disturb_each_other():
    model = tiny(depth=1)
    engine = GpuEngine(model, "fp32", Interpreter("sm_80"))
    images = [picture(model, B=B, seed=B) for B in (1, 2, 3, 4)]
    alone = [GpuEngine(model, "fp32", Interpreter("sm_80")).logits(image) for image in images]
    found = {}

    def work(i):
        found[i] = [engine.logits(images[i]) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(images))]
    run_together(threads)
    for i, wanted in enumerate(alone):
        assert all(torch.equal(got, wanted) for got in found[i])
