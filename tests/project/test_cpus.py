"""Verdicts do not depend on the host's CPU: a few tests, with libraries forced to other kernels.

`make test-cpus` runs all tests that touch host arithmetic so; these few are the ones whose verdict
OpenBLAS's choice of kernel once decided, and one of each kind of yardstick.
"""

import pytest

from tools import other_cpus

FEW = [
    "tests/gpu/test_attention.py::test_a_sample_does_not_depend_on_its_batch",
    "tests/gpu/test_attention.py::test_any_head_dim[256-fp32]",
    "tests/gpu/test_attention.py::test_stays_exact_with_outlier_channels[attention+bias-fp32]",
    "tests/gpu/test_engine.py::test_a_plan_serves_other_images_of_its_shape_and_only_those",
    "tests/gpu/test_model.py::test_a_training_step_has_the_reference_s_gradients[relative-fp32]",
    "tests/model/test_engine.py::test_matches_reference_on_every_instruction_set",
    "tests/evidence/fixed_order/test_fixed_order.py",
]


@pytest.mark.parametrize(
    "name",
    ("sse", *(pytest.param(name, marks=pytest.mark.full) for name in ("haswell", "skylake-x"))),
)
def test_verdicts_do_not_depend_on_the_cpu(name):
    cpu = other_cpus.CPUS[name]
    missing = other_cpus.lacks(cpu)
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    done = other_cpus.run(cpu, FEW)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
