"""Kernels compiled at their first use: kept on disk, whatever becomes of the disk."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

pytest.importorskip("triton")
import triton

from tests.evidence.fake_cuda import fake_cuda
from tests.gpu.aot_kernels import plain_variant, refused, scaled
from tests.gpu.mocked_driver import pretended, vendors_driver
from tests.threads import run_together
from vitkern import _C
from vitkern.gpu import compiler, configs, launch
from vitkern.gpu.runtime import cache as caches
from vitkern.gpu.runtime.binary import BinaryExecutor
from vitkern.gpu.runtime.cache import Cache


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that were compiled, by name, not found."""
    names = []

    def note(variant, arch):
        names.append(variant.kernel.__name__)
        return compiler.compile_variant(variant, arch)

    monkeypatch.setattr(caches, "compile_variant", note)
    return names


VARIANT = plain_variant("sm_80")


def served(folder, arch="sm_80"):
    """The kernel, as another process would get it."""
    cache = Cache(arch, folder)
    return cache.find(VARIANT) or cache.compile(VARIANT)


def files(folder):
    return sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_a_kernel_is_compiled_once(tmp_path, compiled, arch):
    first, second = served(tmp_path, arch), served(tmp_path, arch)
    assert compiled == ["scaled"] and first == second
    assert first.image() == second.code == compiler.compile_variant(VARIANT, arch).code
    binary, row = files(tmp_path) if arch == "sm_80" else reversed(files(tmp_path))
    assert {binary.suffix, row.suffix} == {".json", ".cubin" if arch == "sm_80" else ".hsaco"}
    assert binary.parent == row.parent == tmp_path / triton.__version__ / arch


def test_another_architecture_or_kernel_is_another_entry(tmp_path, compiled):
    served(tmp_path)
    assert Cache("sm_90", tmp_path).find(VARIANT) is None
    other = launch.Variant(
        scaled, VARIANT.signature, VARIANT.constants, VARIANT.divisible[1:], 4, 1
    )
    assert Cache("sm_80", tmp_path).find(other) is None


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path):
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def change(**fields):
    def apply(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


DAMAGE = {
    "cubin": {"cut": cut, "flip": flip, "gone": pathlib.Path.unlink, "link": link},
    "json": {
        "cut": cut, "gone": pathlib.Path.unlink, "nested": lambda p: p.write_text("[" * 100_000),
        "bytes": lambda p: p.write_bytes(b"\xff\xfe"), "list": lambda p: p.write_text("[]"),
        "key": change(key="0" * 64), "another": change(id="scaled-other"),
        "warps": change(num_warps="4"), "file": change(file="../../precious"),
        "scratch": change(global_scratch=[64, 16]),
    },
}  # fmt: skip


@pytest.mark.parametrize("suffix, how", [(s, how) for s, kinds in DAMAGE.items() for how in kinds])
def test_what_is_damaged_is_compiled_again(tmp_path, compiled, suffix, how):
    whole = served(tmp_path)
    (path,) = (path for path in files(tmp_path) if path.suffix == f".{suffix}")
    DAMAGE[suffix][how](path)
    assert served(tmp_path) == whole and len(compiled) == 2
    assert served(tmp_path) == whole and len(compiled) == 2, "and written again"


def unwritable(tmp_path):
    """A folder that nobody can write to, not even root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def linked(tmp_path):
    """A cache whose folder of the architecture is somewhere else."""
    (tmp_path / "kept" / triton.__version__).mkdir(parents=True)
    (tmp_path / "kept" / triton.__version__ / "sm_80").symlink_to(tmp_path)
    return tmp_path / "kept"


@pytest.mark.parametrize("place", [unwritable, linked])
def test_an_unwritable_folder_means_memory_and_a_warning(tmp_path, compiled, place):
    cache = Cache("sm_80", place(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"cannot be kept \(.*VITKERN_CACHE") as said:
        entry = cache.compile(VARIANT)
        cache.compile(VARIANT)
    assert len(said) == 1, "once is enough"
    assert cache.find(VARIANT) == entry and entry.image() == entry.code
    assert len(compiled) == 2


def test_a_user_without_a_home_gets_memory(monkeypatch, compiled):
    monkeypatch.delenv(caches.FOLDER, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "expanduser", homeless)
    cache = Cache("sm_80")  # no warning yet: a folder of binaries may have all that is needed
    assert cache.find(VARIANT) is None
    with pytest.warns(RuntimeWarning, match="home directory"):
        entry = cache.compile(VARIANT)
    assert cache.find(VARIANT) == entry


def test_the_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(caches.FOLDER, raising=False)
    assert caches.default_folder() == tmp_path / "vitkern" / "kernels"
    monkeypatch.setenv(caches.FOLDER, str(tmp_path / "mine"))
    assert Cache("sm_80").folder == tmp_path / "mine" / triton.__version__
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv(caches.FOLDER)
    assert caches.default_folder() == pathlib.Path.home() / ".cache" / "vitkern" / "kernels"


def test_tritons_own_cache_need_not_be_writable(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(unwritable(tmp_path)))
    assert served(tmp_path / "kept").code == compiler.compile_variant(VARIANT, "sm_80").code


PROCESS = """
    import sys
    from tests.gpu.aot_kernels import plain_variant
    from vitkern.gpu.runtime.cache import Cache

    print("ready", flush=True)
    sys.stdin.readline()
    variant = plain_variant("sm_80")
    for _ in range(20):
        cache = Cache("sm_80", sys.argv[1])
        made = cache.compile(variant)
        found = cache.find(variant)
        assert found is not None and found.code == made.code, "half of a kernel was read"
"""


def test_writers_do_not_disturb_readers(tmp_path):
    """Whatever compilers make of it: here each writer's code is another."""
    cache = Cache("sm_80", tmp_path)
    binary = compiler.compile_variant(VARIANT, "sm_80")
    wrong, codes = [], [binary.code + bytes([i]) for i in range(4)]
    cache.keep(VARIANT, binary.facts, codes[0])

    def write(code):
        mine = Cache("sm_80", tmp_path)
        for _ in range(25):
            mine.keep(VARIANT, binary.facts, code)
            found = mine.find(VARIANT)
            if found is None or found.code not in codes:
                wrong.append(found)

    threads = [threading.Thread(target=write, args=(code,)) for code in codes]
    run_together(threads)
    assert not wrong
    assert len(files(tmp_path)) == len(codes) + 1, "nothing is left beside"


@pytest.mark.full
def test_two_processes_write_the_same_kernel(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert len(files(tmp_path)) == 2, "nothing is left beside"
    assert Cache("sm_80", tmp_path).find(VARIANT) is not None


def test_of_several_threads_one_compiles(tmp_path, compiled, monkeypatch):
    noting = caches.compile_variant
    slow = lambda *given: (time.sleep(0.1), noting(*given))[1]  # noqa: E731
    monkeypatch.setattr(caches, "compile_variant", slow)
    executor = BinaryExecutor(
        None, 0, "sm_80", vendors_driver("sm_80"), lambda: 0, torch.device("cpu"),
        Cache("sm_80", tmp_path),
    )  # fmt: skip
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(executor.kernel(VARIANT))) for _ in range(4)
    ]
    run_together(threads)
    assert compiled == ["scaled"] and len(found) == 4 and len(set(map(id, found))) == 1


# ---- what the user sees ----


def scaled_launch(kernel=scaled):
    x, y = torch.randn(4096), torch.zeros(4096)
    with launch.executing(launch.Recorder("sm_80")) as recorder:
        row = configs.Row({"BLOCK": 1024}, 4, 1, "")
        launch.launch(kernel, (4,), row, ("y",), x=x, y=y, D=4096)
    return recorder.launches[0]


def test_a_second_process_compiles_nothing(tmp_path, compiled):
    one = scaled_launch()
    for times, said in ((1, "1 compiled now"), (1, f"1 of the cache of {tmp_path}")):
        with pretended("sm_80", tmp_path) as executor:
            assert "launches so far: none" in executor.status()
            executor.native.prepare([one, one])
            entry = executor.native.cache.find(one.variant)
            fake_cuda().register(entry.code, scaled, entry.arguments, dict(one.variant.constants))
            executor.run(one)
            assert said in executor.status() and "launches so far: 1" in executor.status()
        assert len(compiled) == times
    assert torch.equal(one.arguments["y"], 2 * one.arguments["x"])


def test_a_kernel_that_never_compiles_is_named(tmp_path):
    with pretended("sm_80", tmp_path) as executor:
        with pytest.raises(RuntimeError, match=r"(?s)cannot compile refused-.*model.path = 'refer"):
            executor.run(scaled_launch(refused))
    assert not files(tmp_path)


def test_no_c_compiler_is_needed(tmp_path):
    """Triton builds its own launcher with one: nothing here may start that."""
    fake_cuda()  # whose library is compiled before
    code = """
        import sys, torch
        from tests.gpu.aot_kernels import plain_variant
        from vitkern import _C
        from vitkern.gpu.runtime.binary import BinaryExecutor
        from vitkern.gpu.runtime.cache import Cache

        cache, driver = Cache("sm_80", sys.argv[1]), _C.Driver("cuda", sys.argv[2])
        executor = BinaryExecutor(None, 0, "sm_80", driver, cache=cache)
        print(executor.kernel(plain_variant("sm_80")).name)
    """
    environment = {**os.environ, "PATH": str(tmp_path), "CC": "/none", "CXX": "/none"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path / "kept", fake_cuda().path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "scaled\n"), ran.stderr


class Terminal:
    def __init__(self, is_one):
        self.text, self.isatty = "", lambda: is_one

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("is_one", [True, False])
def test_who_waits_is_told(tmp_path, monkeypatch, is_one):
    terminal = Terminal(is_one)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(caches, "LONG", 15.0)
    cache = Cache("sm_80", tmp_path)
    cache.compile(VARIANT, "1 of 2")
    assert ("compiling scaled for sm_80, 1 of 2 (`vitkern warmup`" in terminal.text) == is_one
    assert terminal.text.endswith("\r\033[K" if is_one else ""), "the line goes with its reason"
    monkeypatch.setattr(caches, "LONG", 0.0)
    cache.compile(VARIANT, "2 of 2")
    assert ("compiled 1 kernels in " in terminal.text) != is_one
    monkeypatch.setattr(sys, "stderr", None)  # a program without a console
    cache.compile(VARIANT)


def test_a_driver_that_cannot_be_loaded_is_said_at_the_first_launch(tmp_path):
    with pytest.raises(_C.DriverError, match="cannot be loaded"):
        _C.Driver("cuda", str(tmp_path / "libcuda.so.1"))
