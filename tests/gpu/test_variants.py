"""Single launches: C++ knows one that is like an earlier one by its arguments, and no other."""

import dataclasses
import itertools
import threading

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.threads import run_together
from vitkern import _C
from vitkern.gpu.runtime.binary import BinaryExecutor
from vitkern.gpu.runtime.cache import Cache

X, BIAS, Y = sample.affine_operands()
ODD = torch.zeros(10 * 48 + 1)[1:].view(10, 48)  # whose address is no multiple of 16


def changed(launch, **arguments):
    return dataclasses.replace(launch, arguments=launch.arguments | arguments)


ONE = sample.affine_launch(X, Y, BIAS)
LAUNCHES = {
    "one": ONE,
    "other tensors": sample.affine_launch(X.clone(), Y.clone(), BIAS.clone(), factor=0.25),
    "rows": changed(ONE, M=16),  # which promises nothing
    "odd input": sample.affine_launch(ODD, Y, BIAS),
    "odd result": sample.affine_launch(X, ODD, BIAS),
    "dtype": sample.affine_launch(X.bfloat16(), Y, BIAS),
    "half": sample.affine_launch(X.half(), Y, BIAS),
    "no bias": sample.affine_launch(X, Y),
    "wide integer": changed(ONE, D=48 + 2**32),
    "wide odd integer": changed(ONE, D=49 + 2**32),
    "negative": changed(ONE, D=-16),
    "odd integer": changed(ONE, D=47),
    "one as a size": changed(ONE, D=1),
    "constant": changed(ONE, BM=8),
    "warps": sample.affine_launch(X, Y, BIAS, num_warps=8),
    "stages": dataclasses.replace(ONE, num_stages=2),
    "tuple": changed(ONE, D=(48, 48)),
    "longer tuple": changed(ONE, D=(48, 48, 48)),
    "odd tuple": changed(ONE, D=(48, 47)),
    "text": changed(ONE, BM="8"),
    "texts": changed(ONE, BM=("8", "tf32")),
    "other texts": changed(ONE, BM=("8tf32", "")),
    "float": changed(ONE, BM=8.0),
    "truth": changed(ONE, BM=True),
}


def letters(launch):
    kinds = (
        "c" if p.is_constexpr else "p" if p.do_not_specialize else "d" for p in launch.kernel.params
    )
    return "".join(kinds)


def settings(launch):
    return launch.arguments, launch.num_warps, launch.num_stages


class Served:
    """Stands for the kernel that serves a launch: refuses, so that nothing is started."""

    def __init__(self, fake, launch):
        count = len(launch.run_time())
        rows = [(f"p{i}", "i64", False) for i in range(count)]
        self.kernel = sample.load(
            fake, ONE, parameters=rows, hidden=0, name="affine", _skip={"layout", "values"}
        )


@pytest.mark.parametrize("tensor", [torch.Tensor, torch._C.TensorBase], ids=["new", "old torch"])
def test_a_launch_is_known_by_its_variant(fake, tensor):
    """For each pair of launches: the one is known after the other if their variants are equal."""
    assert hasattr(tensor, "__dlpack_c_exchange_api__") == (tensor is torch.Tensor)
    fake.library.fake_execute(None)
    known = {}
    try:
        for name, launch in LAUNCHES.items():
            known[name] = _C.Variants(tensor, letters(launch), -1)
            known[name].add(*settings(launch), Served(fake, launch).kernel)
        for (a, one), (b, other) in itertools.product(LAUNCHES.items(), repeat=2):
            same = one.variant == other.variant  # to which 8.0 is 8, and True is 1
            same = same and one.variant.name == other.variant.name
            try:
                found = known[a].start(*settings(other), (1, 1, 1), 0)
            except ValueError:  # found, and refused: a float where this kernel has an integer
                found = True
            assert found == same, f"{b} after {a}"
    finally:
        fake.library.fake_execute(fake._callback)


@pytest.fixture
def executor(fake, tmp_path):
    cache = Cache("sm_80", tmp_path)
    driver = _C.Driver("cuda", fake.path)
    made = BinaryExecutor(None, 0, "sm_80", driver, lambda: 0, torch.device("cpu"), cache)

    def prepare(launch):
        made.kernel(launch.variant)
        entry, v = cache.find(launch.variant), launch.variant
        fake.register(entry.code, v.kernel, entry.arguments, dict(v.constants))
        return launch

    made.with_source = prepare
    return made


def test_only_the_first_launch_of_a_kind_is_described_in_python(executor, monkeypatch):
    for name in ("one", "no bias", "dtype", "odd input"):
        executor.run(executor.with_source(LAUNCHES[name]))
    monkeypatch.setattr(executor, "kernel", None)
    monkeypatch.setattr(executor, "values", None)
    for bias, dtype in ((BIAS, torch.float32), (None, torch.float32), (BIAS, torch.bfloat16)):
        x, y = torch.randn(10, 48).to(dtype), torch.zeros(10, 48)
        executor.run(sample.affine_launch(x, y, bias, factor=2.0))
        torch.testing.assert_close(y, sample.affine_expected(x, bias, 2.0))
    y = torch.zeros(10, 48)
    executor.run(sample.affine_launch(ODD.normal_(), y, BIAS))
    torch.testing.assert_close(y, sample.affine_expected(ODD, BIAS))
    assert executor.launched == 8


def test_a_tensor_elsewhere_is_named(executor):
    executor.run(executor.with_source(ONE))
    for elsewhere in (torch.empty(10, 48, device="meta"),):
        with pytest.raises(ValueError, match="x is on meta, but the kernel runs on cpu"):
            executor.run(sample.affine_launch(elsewhere, Y, BIAS))


def test_what_only_python_knows_is_left_to_it(fake, executor):
    executor.run(executor.with_source(ONE))
    known = _C.Variants(torch.Tensor, letters(ONE), -1)
    for wrong in ({"BM": object()}, {"M": "ten"}, {"M": 2**70}, {"BM": 2**70}, {"D": (None,)}):
        odd = changed(ONE, **wrong)
        known.add(*settings(odd), executor.kernel(ONE.variant))
        assert not known.start(*settings(odd), (1, 1, 1), 0)
    assert not known.start({}, 4, 3, (1, 1, 1), 0)


def test_mistakes_are_errors(executor):
    kernel = executor.kernel(ONE.variant)
    with pytest.raises(ValueError, match=r"c\(onstant\), d\(ivisible\) or p\(lain\)"):
        _C.Variants(torch.Tensor, "abc", -1)
    known = _C.Variants(torch.Tensor, letters(ONE), -1)
    with pytest.raises(TypeError):
        known.add(*settings(ONE), None)
    with pytest.raises(ValueError, match="takes other arguments than these"):
        known.add(*settings(LAUNCHES["no bias"]), kernel)
    known.add(*settings(ONE), kernel)
    with pytest.raises(ValueError, match="no GPU starts a grid"):
        known.start(*settings(ONE), (0, 1, 1), 0)


def test_threads_launch_at_once(fake, executor):
    executor.run(executor.with_source(ONE))
    fake.pause(0.005)
    done = []

    def work():
        for _ in range(5):
            x, y = torch.randn(10, 48), torch.zeros(10, 48)
            executor.run(sample.affine_launch(x, y, BIAS))
            done.append((x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    run_together(threads)
    assert len(done) == 20
    for x, y in done:
        torch.testing.assert_close(y, sample.affine_expected(x, BIAS))
