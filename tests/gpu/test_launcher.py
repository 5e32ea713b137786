"""The C++ launcher against a stand-in driver that holds it to what the real binaries say.

What the launcher itself refuses is a ValueError; what only the driver notices is a DriverError,
which tests provoke by leaving a check of the launcher out.
"""

import threading
import time

import pytest
import torch

pytest.importorskip("triton")
from tests.evidence.fake_cuda import kernels as sample
from tests.evidence.fake_cuda.kernels import load, values_of
from tests.threads import run_together
from vitkern import _C

ARCHS = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}


def with_value(launch, name, value):
    """The launch's values with one of them replaced."""
    names = [n for n, _ in launch.variant.signature]
    return [value if n == name else v for n, v in zip(names, values_of(launch), strict=True)]


@pytest.fixture
def operands():
    return sample.affine_operands()


@pytest.fixture
def launch(operands):
    x, bias, y = operands
    return sample.affine_launch(x, y, bias)


# ---- Right launches --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("arch", ARCHS)
def test_result_equals_torch(fake, operands, arch, with_bias, dtype):
    fake.reset(ARCHS[arch])
    x, bias, y = operands
    x, bias = x.to(dtype), bias if with_bias else None
    launch = sample.affine_launch(x, y, bias)
    load(fake, launch, arch).launch(launch.grid, 0, values_of(launch))
    torch.testing.assert_close(y, sample.affine_expected(x, bias), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_memory_above_48_kb_is_asked_for(fake, arch):
    fake.reset(ARCHS[arch])
    a, b, y = sample.matmul_operands()
    launch = sample.matmul_launch(a, b, y, num_stages=4 if arch == "sm_100" else 3)
    shared = sample.compiled(launch.variant, arch).metadata.shared
    assert shared > 48 * 1024
    load(fake, launch, arch).launch(launch.grid, 0, values_of(launch))
    torch.testing.assert_close(y, a.float() @ b.float(), rtol=1e-4, atol=1e-4)
    assert f"opted in to {shared}" in fake.journal()
    assert f"launch matmul (1, 1, 1) x 256, {shared} bytes, stream 0" in fake.journal()


def test_older_binaries_run_on_later_gpus_of_their_generation(fake, launch, operands):
    fake.reset(89)
    x, bias, y = operands
    load(fake, launch, "sm_80").launch(launch.grid, 0, values_of(launch))
    torch.testing.assert_close(y, sample.affine_expected(x, bias))


def test_driver_describes_its_devices(fake):
    fake.reset(80, 120)
    driver = _C.Driver("cuda", fake.path)
    assert (driver.api, driver.path, driver.device_count) == ("cuda", fake.path, 2)
    wanted = {"name": "Stand-in 120", "arch": "sm_120", "shared_limit": 99 * 1024}
    assert driver.device(1) == wanted
    with pytest.raises(_C.DriverError, match=r"opening GPU 2: cuDeviceGet failed.*101"):
        driver.device(2)


# ---- Wrong launches --------------------------------------------------------------


def test_too_many_warps_are_refused(fake, launch):
    with pytest.raises(ValueError, match="blocks of 256 threads, its binary allows 128"):
        load(fake, launch, num_warps=8)


@pytest.mark.parametrize("num_warps", [2, 8])
def test_driver_refuses_wrong_number_of_warps(fake, launch, num_warps):
    kernel = load(fake, launch, num_warps=num_warps, _skip={"layout"})
    with pytest.raises(_C.DriverError, match=r"starting kernel affine .*compiled for 128"):
        kernel.launch(launch.grid, 0, values_of(launch))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("x", 4096 + 8, "x .*starts 8 bytes after a multiple of 16.*clone"),
        ("x", -16, "x .*cannot be at address -16"),
        ("x", 48, "x .*cannot be at address 48"),
        ("x", 2**70, "does not fit in 64 bits"),
        ("x", 1.0, r"x \(\*fp32\) must be an int"),
        ("factor", 2, "factor .* must be a float"),
        ("factor", 1e300, "factor .* cannot hold"),
        ("M", 2**31, "M .i32. cannot hold 2147483648"),
        ("M", -(2**31) - 1, "M .i32. cannot hold -2147483649"),
        ("D", 47, "D = 47 is no multiple of 16"),
        ("x_stride", 50, "x_stride = 50 is no multiple of 16"),
        ("x", _C.Slot(0), "slot has no address outside a launch list"),
        ("M", _C.Slot(0), "M .i32. cannot be slot 0"),
    ],
)
def test_values_that_break_the_binarys_promises_are_refused(fake, launch, name, value, message):
    kernel = load(fake, launch)
    with pytest.raises(ValueError, match=message):
        kernel.launch(launch.grid, 0, with_value(launch, name, value))
    assert not fake.executed


@pytest.mark.parametrize(
    "value", [None, "1", torch.zeros(1), b"12345678"], ids=lambda v: type(v).__name__
)
def test_values_are_numbers(fake, launch, value):
    with pytest.raises(TypeError, match=r"ints .addresses too., floats and Slots"):
        load(fake, launch).launch(launch.grid, 0, with_value(launch, "x", value))


@pytest.mark.parametrize("count", [0, 7, 9])
def test_number_of_values_is_checked(fake, launch, count):
    values = (values_of(launch) * 2)[:count]
    with pytest.raises(ValueError, match=f"takes 8 values, not {count}"):
        load(fake, launch).launch(launch.grid, 0, values)


@pytest.mark.parametrize("first, second", [("x", "M"), ("y", "D"), ("factor", "M"), ("M", "D")])
def test_swapped_arguments_are_refused(fake, launch, first, second):
    """A pointer for a size, a float for an int, a size that breaks the other one's promise."""
    values = dict(zip((n for n, _ in launch.variant.signature), values_of(launch), strict=True))
    values[first], values[second] = values[second], values[first]
    with pytest.raises(ValueError, match="kernel affine: parameter"):
        load(fake, launch).launch(launch.grid, 0, list(values.values()))


@pytest.mark.parametrize("name, wrong", [("x", 4), ("D", 1), ("x_stride", 2)])
def test_driver_refuses_broken_promises(fake, launch, name, wrong):
    kernel = load(fake, launch, _skip={"values"})
    names = [n for n, _ in launch.variant.signature]
    value = values_of(launch)[names.index(name)] + wrong
    with pytest.raises(_C.DriverError, match=f"716.*{name} = {value} breaks the promise"):
        kernel.launch(launch.grid, 0, with_value(launch, name, value))


def test_driver_refuses_addresses_of_nothing(fake, launch):
    with pytest.raises(_C.DriverError, match=r"700.*x = 0x10000 is no memory"):
        load(fake, launch).launch(launch.grid, 0, with_value(launch, "x", 1 << 16))


GRIDS = [(0, 1, 1), (-1, 1, 1), (2**31, 1, 1), (1, 65536, 1), (1, 1, 65536)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_impossible_grids_are_refused(fake, launch, grid):
    with pytest.raises(ValueError, match="no GPU starts a grid"):
        load(fake, launch).launch(grid, 0, values_of(launch))
    with pytest.raises(_C.DriverError, match="1: stand-in error 1: grid"):
        load(fake, launch, _skip={"values"}).launch(grid, 0, values_of(launch))


# ---- Wrong binaries --------------------------------------------------------------


@pytest.mark.parametrize("binary, gpu", [("sm_80", 90), ("sm_90", 100), ("sm_120", 121)])
def test_foreign_architectures_are_refused(fake, launch, binary, gpu):
    fake.reset(gpu)
    wanted = f"compiled for {binary}, but GPU 0 .Stand-in {gpu}. is sm_{gpu}.*Build the kernels"
    with pytest.raises(ValueError, match=wanted):
        load(fake, launch, binary)
    assert "cuModuleLoadData" not in fake.journal()
    with pytest.raises(_C.DriverError, match=r"cuModuleLoadData failed.* 209.*another GPU"):
        load(fake, launch, binary, _skip={"arch"})


def test_newer_binaries_of_a_generation_are_refused(fake, launch):
    with pytest.raises(ValueError, match="compiled for sm_86, but GPU 0"):
        load(fake, launch, "sm_86")


def test_more_shared_memory_than_the_gpu_has_is_refused(fake):
    fake.reset(86)
    launch = sample.matmul_launch(*sample.matmul_operands(), num_stages=5)
    with pytest.raises(ValueError, match=r"shared memory.*Stand-in 86.*101376.*fewer stages"):
        load(fake, launch, "sm_80")


def test_driver_refuses_shared_memory_without_opting_in(fake):
    launch = sample.matmul_launch(*sample.matmul_operands())
    kernel = load(fake, launch, _skip={"shared"})
    with pytest.raises(_C.DriverError, match="without opting in to more than 49152"):
        kernel.launch(launch.grid, 0, values_of(launch))


def test_wrong_kernel_names_are_refused(fake, launch):
    with pytest.raises(_C.DriverError, match=r"loading kernel nonesuch: cuModuleGetFunction.*500"):
        load(fake, launch, name="nonesuch")


@pytest.mark.parametrize("part", [0, 3, 63, 0.1, 0.5, 0.9, -1])
def test_truncated_binaries_are_refused(fake, launch, part):
    image = sample.image_of(launch.variant, "sm_80")
    size = part if isinstance(part, int) else int(part * len(image))
    with pytest.raises(ValueError, match=r"its binary is (truncated|no compiled kernel): build"):
        load(fake, launch, image=image[:size])
    assert "cuModuleLoadData" not in fake.journal()


def test_other_files_are_refused(fake, launch):
    with pytest.raises(ValueError, match="is no compiled kernel"):
        load(fake, launch, image=b"//\n// Generated by LLVM NVPTX Back-End\n//" * 10)
    with pytest.raises(ValueError, match="is not for an NVIDIA GPU"):
        load(fake, launch, image=sample.image_of(launch.variant, "gfx942"))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows[:-1], "its binary has more"),
        (lambda rows: [*rows, ("z", "i32", False)], "its binary has fewer|hidden|z has 4 bytes"),
        (lambda rows: rows[3:] + rows[:3], "factor has 4 bytes in its manifest and 8"),
    ],
    ids=["fewer", "more", "order"],
)
def test_manifests_must_match_the_binary(fake, launch, change, message):
    rows = sample.arguments_of(launch.variant)
    with pytest.raises(ValueError, match=message):
        load(fake, launch, parameters=change(rows))


def test_unknown_parameter_types_are_refused(fake, launch):
    rows = [("x", "tensordesc<fp32[4,64]>", False)]
    with pytest.raises(ValueError, match="no parameter type 'tensordesc"):
        load(fake, launch, parameters=rows)


# ---- The driver --------------------------------------------------------------------


def test_missing_driver_library_is_explained(tmp_path):
    with pytest.raises(_C.DriverError, match=r"NVIDIA's GPU driver.*\n.*no/libcuda.so.1"):
        _C.Driver("cuda", str(tmp_path / "no" / "libcuda.so.1"))
    with pytest.raises(_C.DriverError, match="ROCm"):
        _C.Driver("hip", str(tmp_path / "libamdhip64.so"))
    with pytest.raises(ValueError, match="no GPU driver API 'metal'"):
        _C.Driver("metal")


def test_library_that_lacks_functions_is_refused(fake):
    with pytest.raises(_C.DriverError, match="has no function hipInit: the GPU driver is too old"):
        _C.Driver("hip", fake.path)


CALLS = ["cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"]
CALLS += ["cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuModuleLoadData"]
CALLS += ["cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuLaunchKernel"]


@pytest.mark.parametrize("call", CALLS)
def test_driver_errors_are_raised_and_leave_no_trace(fake, call):
    """Whatever call fails, the error says so, and the same thing done again succeeds."""
    a, b, y = sample.matmul_operands()
    launch = sample.matmul_launch(a, b, y)
    fake.call("cuInit", 0)
    fake.fail(call, 2)
    message = f"{call} failed with error 2: stand-in error 2: as the test wants. Free GPU memory"
    with pytest.raises(_C.DriverError, match=message):
        load(fake, launch).launch(launch.grid, 0, values_of(launch))
    assert fake.current_context() is None and not fake.executed
    load(fake, launch).launch(launch.grid, 0, values_of(launch))
    torch.testing.assert_close(y, a.float() @ b.float(), rtol=1e-4, atol=1e-4)


def test_failed_module_is_loaded_at_the_next_try(fake, launch):
    driver = _C.Driver("cuda", fake.path)
    fake.fail("cuModuleLoadData", 2)
    with pytest.raises(_C.DriverError, match=r"loading a binary on GPU 0 .Stand-in 80, sm_80."):
        load(fake, launch, driver=driver)
    load(fake, launch, driver=driver).launch(launch.grid, 0, values_of(launch))
    assert len(fake.executed) == 1


def test_two_devices_have_their_own_modules(fake, launch):
    fake.reset(80, 80)
    driver = _C.Driver("cuda", fake.path)
    for device in (0, 1, 0, 1):
        load(fake, launch, device=device, driver=driver).launch(launch.grid, 0, values_of(launch))
    assert fake.executed == [(0, "affine"), (1, "affine"), (0, "affine"), (1, "affine")]
    loads = [line for line in fake.journal() if line.startswith("loaded")]
    assert loads == ["loaded sm_80 on device 0", "loaded sm_80 on device 1"]


def test_callers_context_is_left_as_it_was(fake, launch):
    fake.reset(80, 80)
    kernel = load(fake, launch)
    assert fake.current_context() is None
    with fake.context(1) as context:
        kernel.launch(launch.grid, 0, values_of(launch))
        fake.fail("cuLaunchKernel", 701)
        with pytest.raises(_C.DriverError, match="fewer warps or stages"):
            kernel.launch(launch.grid, 0, values_of(launch))
        assert fake.current_context() == context
    assert fake.executed == [(0, "affine")]


def test_streams_of_another_device_are_refused(fake, launch):
    fake.reset(80, 80)
    with fake.context(1):
        stream = fake.stream()
    with pytest.raises(_C.DriverError, match=r"400.*another device"):
        load(fake, launch).launch(launch.grid, stream, values_of(launch))


def test_launches_from_several_threads(fake, launch, operands):
    kernel, failures = load(fake, launch), []
    ys = [torch.zeros_like(operands[2]) for _ in range(4)]

    def work(y):
        try:
            kernel.launch(launch.grid, 0, with_value(launch, "y", y.data_ptr()))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(y,)) for y in ys]
    run_together(threads)
    assert not failures
    for y in ys:
        torch.testing.assert_close(y, sample.affine_expected(*operands[:2]))


def test_python_runs_on_while_the_driver_works(fake, launch):
    kernel = load(fake, launch)
    fake.pause(0.2)
    thread = threading.Thread(target=kernel.launch, args=(launch.grid, 0, values_of(launch)))
    thread.start()
    steps = 0
    while thread.is_alive() and not fake.executed:
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert steps > 20
