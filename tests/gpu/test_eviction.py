"""The cache of compiled kernels stays below a size, and nobody is disturbed by that."""

import os
import threading
import time

import pytest

pytest.importorskip("triton")

from tests.gpu.aot_kernels import plain_variant
from tests.threads import run_together
from vitkern.gpu import compiler
from vitkern.gpu.runtime import eviction
from vitkern.gpu.runtime.cache import Cache

VARIANT = plain_variant("sm_80")
KIB = 1 << 10


@pytest.fixture(scope="module")
def binary():
    return compiler.compile_variant(VARIANT, "sm_80")


def kernel(folder, number, *, age, size=KIB, name=None, arch="3.7.1/sm_80"):
    """A file as the cache writes them, last used some hours ago."""
    path = folder / arch / (name or f"gemm-{number:016x}.cubin")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    when = time.time() - age * eviction.HOUR
    os.utime(path, (when, when))
    return path


def test_what_was_used_longest_ago_goes_first(tmp_path):
    """Whatever Triton and architecture it is of."""
    archs = ("3.7.1/sm_80", "3.6.0/gfx942")
    made = [kernel(tmp_path, i, age=10 - i, arch=archs[i % 2]) for i in range(6)]
    eviction.trim(tmp_path, 4 * KIB)
    assert [path.exists() for path in made] == [False, False, True, True, True, True]
    eviction.trim(tmp_path, 4 * KIB)
    assert sum(path.exists() for path in made) == 4, "no more than is needed"


def test_what_is_not_the_caches_stays(tmp_path):
    elsewhere = kernel(tmp_path / "elsewhere", 7, age=99)
    others = [
        kernel(tmp_path, 0, age=99, name="thesis.json"),
        kernel(tmp_path, 0, age=99, name="gemm-0123.cubin"),
        kernel(tmp_path, 1, age=99, arch="."),
        kernel(tmp_path, 2, age=99, arch="3.7.1/sm_80/deeper"),
    ]
    (tmp_path / "3.7.1" / "sm_90").symlink_to(elsewhere.parent)
    link = tmp_path / "3.7.1" / "sm_80" / "gemm-0000000000000009.cubin"
    link.symlink_to(others[0])
    eviction.trim(tmp_path, 0)
    assert all(path.exists() for path in (elsewhere, link, *others))
    eviction.trim(tmp_path / "nowhere", 0)


def test_files_that_a_killed_writer_left_go(tmp_path):
    old = kernel(tmp_path, 0, age=2, name=".gemm-0123456789abcdef.json-x8_1")
    new = kernel(tmp_path, 0, age=0, name=".gemm-0123456789abcdef.json-x8_2")
    eviction.trim(tmp_path, 1 << 20)
    assert not old.exists() and new.exists()


def test_a_kernel_that_is_loaded_is_young_again(tmp_path, binary):
    cache = Cache("sm_80", tmp_path)
    cache.keep(VARIANT, binary.facts, binary.code)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in paths:
        os.utime(path, (0, 0))
    assert cache.find(VARIANT) is not None
    assert len(paths) == 2 and all(time.time() - path.stat().st_mtime < 60 for path in paths)


def test_the_user_says_how_much_is_kept(tmp_path, binary, monkeypatch):
    monkeypatch.setenv(eviction.LIMIT, "1")
    old = [kernel(tmp_path, i, age=9, size=700 * KIB) for i in range(2)]
    cache = Cache("sm_80", tmp_path)
    cache.keep(VARIANT, binary.facts, binary.code)
    assert sum(path.exists() for path in old) == 1 and cache.find(VARIANT) is not None


@pytest.mark.parametrize("said", ["0", "-1", "1.5", "much", "1e3", "٣", "9" * 40])
def test_a_size_that_is_none_is_refused(monkeypatch, said):
    monkeypatch.setenv(eviction.LIMIT, said)
    with pytest.raises(ValueError, match=r"VITKERN_CACHE_SIZE is .* whole number of MiB, such as"):
        Cache("sm_80")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_readers_meet_whole_kernels_or_none(tmp_path, binary):
    found = []

    def write_and_remove():
        mine = Cache("sm_80", tmp_path)
        for _ in range(50):
            mine.keep(VARIANT, binary.facts, binary.code)
            eviction.trim(tmp_path, 0)

    def read():
        mine = Cache("sm_80", tmp_path)
        for _ in range(200):
            found.append(mine.find(VARIANT))

    run_together([threading.Thread(target=one) for one in (write_and_remove, read, read)])
    assert {one.code for one in found if one is not None} <= {binary.code}
