"""Options that no published model has together, by the GPU's kernels in the interpreter."""

import copy

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fixed_order.torch_mode import FixedOrder
from tests.gpu.contract import gpu
from tests.model.test_combinations import TOGETHER
from tests.model.tiny_models import check_error, picture, tiny
from vitkern.engines.trace import Launchers
from vitkern.precision import PRECISIONS, name_of

SAMPLE = {
    "gated-map": torch.float32,
    "everything-post_norm": torch.float32,
    "gated-twin": torch.bfloat16,
    "rotary-shared-relative": torch.bfloat16,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_the_operators_have_the_modules_result(name):
    dtype = SAMPLE[name]
    model = tiny(dtype, depth=2, **TOGETHER[name])
    image, whole = picture(model, B=2), copy.deepcopy(model).double()
    with torch.no_grad():
        truth = whole.reference_forward(image.double())
        with FixedOrder():
            theirs = model.reference_forward(image)
        with gpu("fp32"), Launchers():
            got = model.fused_forward(image, None)
    check_error(got, theirs, truth, dtype, name, PRECISIONS[name_of(dtype)])
