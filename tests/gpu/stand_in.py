"""An executor of real binaries, built for some launches, on the stand-in driver."""

import torch

from tests.evidence.fake_cuda import fake_cuda
from vitkern import _C
from vitkern.gpu.aot import build as aot
from vitkern.gpu.runtime.binary import BinaryExecutor, Store


def build(launches, arch, folder, stream=lambda: 0) -> BinaryExecutor:
    """Compiles the launches into the folder; the driver is reset, tensors are the CPU's."""
    wanted = {one.variant for one in launches}
    assert not aot.build({arch: wanted}, folder, jobs=1).failures
    fake = fake_cuda()
    fake.reset(int(arch[3:]))
    store = Store(folder)
    for variant in wanted:
        entry = store.find(variant, arch)
        fake.register(entry.image(), variant.kernel, entry.arguments, dict(variant.constants))
    driver = _C.Driver("cuda", fake.path)
    return BinaryExecutor(store, 0, arch, driver, stream, torch.device("cpu"))
