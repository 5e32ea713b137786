"""Damaged folders of ahead-of-time kernels: read, verified and built into again.

Around and inside each folder lie files of somebody else's. Whatever the manifest says, these must
be the same afterwards: only `manifest.json` and regular files named as the build names them are
vitkern's.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
from collections.abc import Callable

import triton

import vitkern
from vitkern.gpu.aot import build as aot
from vitkern.gpu.aot import folder as aot_folder
from vitkern.gpu.runtime import device
from vitkern.gpu.runtime.binary import Store

from .outcome import OK, REFUSED, Case, Damage, judge

NUMBERS = (
    0, -1, 1, 2**27, 2**31, 2**63, 2**64, 10**30, 1.5, float("inf"), float("-inf"), float("nan"),
    None, True, "4", [], {}, [4],
)  # fmt: skip
# What a manifest may call a binary: nothing of this is one.
NAMES = (
    "", ".", "..", "/", "manifest.json", "mine.txt", "../canary", "sub/../../canary", "./mine.txt",
    "sub", "sub/", "sub/mine.txt", "link", "link/canary", "sm_80", "sm_80/", "sm_80/../mine.txt",
    "sm_80/mine.txt", "sm_80/.hidden", "canary\0", "x" * 5000, "a/" * 3000, "C:\\mine", "~/mine",
    "{outside}/canary", "/dev/null", "/dev/zero", "sm_80/affine-0123456789abcdef.txt",
    "outside-0123456789abcdef.cubin", "linked/affine-0123456789abcdef.cubin", "\u202emine.txt",
)  # fmt: skip
TEXTS = ("", "\0", "x" * 10**5, "\ud800", "\n", "sm_80", "sm_", "gfx942", "0" * 64, "é")
NAMES += (0, None, [], {}, 1.5, True, ["mine.txt"])  # type: ignore[assignment]


def case(rng: random.Random, folder: pathlib.Path) -> Case:
    changes = [rng.choice(CHANGES) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    use, seed = rng.choice(USES), rng.randrange(2**31)
    words = ", ".join(change.__name__ for change in changes) or "whole"

    def run() -> str:
        kernels = lay_out(folder)
        own = random.Random(seed)
        for change in changes:
            change(own, kernels)
        before = foreign(folder)
        try:
            use(kernels)
            outcome = OK
        except Exception as error:
            if judge(error) != REFUSED:
                raise
            outcome = REFUSED
        finally:
            compare(before, foreign(folder))
        return outcome

    return Case(f"{use.__name__} of a folder: {words} ({seed})", run)


# ---- the folder ----


def lay_out(folder: pathlib.Path) -> pathlib.Path:
    """Canaries, and among them a folder of four kernels as the build leaves it."""
    kernels, outside = folder / "kernels", folder / "outside"
    for path in (kernels / "sub", outside):
        path.mkdir(parents=True)
    for path in (folder / "canary", outside / "canary", kernels / "mine.txt"):
        path.write_text("not vitkern's")
    (kernels / "sub" / "mine.txt").write_text("not vitkern's either")
    (outside / "affine-0123456789abcdef.cubin").write_bytes(b"nor this")
    (kernels / "link").symlink_to(outside)
    rows = [row for arch in ("sm_80", "sm_90") for row in (entry(arch, 0), entry(arch, 1))]
    for row in rows:
        path = kernels / row["file"]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(binary(row["id"]))
    for arch in ("sm_80", "sm_90"):
        (kernels / arch / "mine.txt").write_text("not vitkern's")
    write(kernels, {"vitkern": vitkern.__version__, "triton": triton.__version__, "kernels": rows})
    return kernels


def binary(name: str) -> bytes:
    return b"\x7fELF" + name.encode() * 20


def entry(arch: str, number: int) -> dict[str, object]:
    name = f"affine-fp32-BM{number}-d0-w4s1-{arch}"
    key = hashlib.sha256(name.encode()).hexdigest()
    return {
        "id": name, "kernel": "affine", "arch": arch, "file": f"{arch}/affine-{key[:16]}.cubin",
        "sha256": hashlib.sha256(binary(name)).hexdigest(), "num_warps": 4, "warp_size": 32,
        "num_stages": 1, "shared": 0, "hidden_parameters": 2, "global_scratch": [0, 1],
        "profile_scratch": [0, 1],
        "arguments": [["x", "*fp32", True], ["n", "i32", False]], "constants": {"BM": number},
        "bytes": len(binary(name)), "function": "vitkern.gpu.layernorm:layernorm_forward",
        "source": "0" * 64, "key": key,
    }  # fmt: skip


def write(kernels: pathlib.Path, manifest: object) -> None:
    """Also what is no JSON for others, Infinity and lone surrogates."""
    _free(kernels / "manifest.json")
    (kernels / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def read(kernels: pathlib.Path) -> dict:
    """The manifest; a whole one where a change before this one left none."""
    path = kernels / "manifest.json"
    try:
        if path.is_file() and path.stat().st_size < 2**20:
            found = json.loads(path.read_text())
            if found["kernels"] and all(isinstance(row, dict) for row in found["kernels"]):
                return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    rows = [entry("sm_80", 0)]
    return {"vitkern": vitkern.__version__, "triton": triton.__version__, "kernels": rows}


def _free(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def foreign(folder: pathlib.Path) -> dict[str, str]:
    """What is not vitkern's, and what it holds."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = pathlib.Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if relative == "kernels/manifest.json" or _is_built(folder, path):
                continue
            if path.is_symlink():
                found[relative] = f"a link to {os.readlink(path)}"
            elif path.is_file():
                found[relative] = f"{path.stat().st_size} {path.read_bytes()[:100]!r}"
            else:
                found[relative] = "a folder" if path.is_dir() else "a pipe"
    return found


def _is_built(folder: pathlib.Path, path: pathlib.Path) -> bool:
    """Whether a build can have written it: a regular file or a folder of its own, not linked."""
    parts = path.relative_to(folder).parts
    if parts[:1] != ("kernels",) or path.is_symlink() or parts[1:2] not in (("sm_80",), ("sm_90",)):
        return False
    if len(parts) == 2:
        return path.is_dir()
    return path.is_file() and len(parts) == 3 and parts[2].endswith((".cubin", ".hsaco"))


def compare(before: dict[str, str], after: dict[str, str]) -> None:
    for name, content in before.items():
        if after.get(name) != content:
            raise Damage(f"{name}: {content}, afterwards {after.get(name, 'gone')}")
    left = [n for n in after if n not in before]
    if left:
        raise Damage(f"{left[0]} was left behind")


# ---- changes of the manifest ----


def other_name(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    name = rng.choice(NAMES)
    if isinstance(name, str):
        name = name.replace("{outside}", str(kernels.parent / "outside"))
    row = rng.choice(manifest["kernels"])
    row["file"] = name
    if rng.random() < 0.5 and isinstance(name, str) and "\0" not in name:  # and its right hash
        path = kernels / name
        if len(name) < 200 and path.is_file():
            row["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    write(kernels, manifest)


def other_number(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    names = ("num_warps", "warp_size", "num_stages", "shared", "hidden_parameters", "bytes",
             "global_scratch", "profile_scratch")  # fmt: skip
    name, number = rng.choice(names), rng.choice(NUMBERS)
    rng.choice(manifest["kernels"])[name] = [number, 1] if "scratch" in name else number
    write(kernels, manifest)


def other_text(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    names = ("id", "kernel", "arch", "sha256", "function", "source", "key")
    texts = (*TEXTS, "os:system", "nonesuch:x", ":", "vitkern.gpu.layernorm", *NUMBERS)
    rng.choice(manifest["kernels"])[rng.choice(names)] = rng.choice(texts)
    write(kernels, manifest)


def other_list(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    lists = ([], [["x"]], [["x", "*fp32", True, 3]], [[1, 2, 3]], ["abc"], "abc", 3, None, {},
             [["x", "i8", 1]], [["x", "*fp32", True]] * 999, {"BM": []}, {"BM": {}})  # fmt: skip
    rng.choice(manifest["kernels"])[rng.choice(("arguments", "constants"))] = rng.choice(lists)
    write(kernels, manifest)


def without_field(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    row = rng.choice(manifest["kernels"])
    row.pop(rng.choice(list(row) or ["id"]), None)
    write(kernels, manifest)


def other_rows(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    rows = manifest["kernels"]
    manifest["kernels"] = rng.choice(
        ([], None, {}, 3, [None], [3], [[]], [rows], rows * 3, rows[:1], [*rows, {}], "abc")
    )
    write(kernels, manifest)


def other_version(rng: random.Random, kernels: pathlib.Path) -> None:
    manifest = read(kernels)
    manifest[rng.choice(("vitkern", "triton"))] = rng.choice((*TEXTS, None, 3, [], "0.0.1"))
    write(kernels, manifest)


def other_text_file(rng: random.Random, kernels: pathlib.Path) -> None:
    """Something that is no manifest at all."""
    deep, path = rng.choice((100, 10**5)), kernels / "manifest.json"
    _free(path)
    whole = json.dumps({"vitkern": "1", "triton": "3", "kernels": [entry("sm_80", 0)]}).encode()
    contents = (
        b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff", b"{}" * 2, b"[" * deep, b"1" * 9999,
        b'{"kernels":' * deep + b"1" + b"}" * deep, b"[" * deep + b"]" * deep, b"\0" * 100,
        b'{"vitkern": "1", "triton": "3", "kernels": ' + b"[" * deep + b"]" * deep + b"}",
        whole[: rng.randrange(len(whole))], b"\xef\xbb\xbf" + whole,
    )  # fmt: skip
    path.write_bytes(rng.choice(contents))


# ---- changes of the files ----


# What may stand where a file should: nothing, a folder, a link out of the tree, a link to itself, a
# pipe that nobody writes to.
ODD_THINGS: tuple[Callable[[pathlib.Path, pathlib.Path], None], ...] = (
    lambda path, kernels: None,
    lambda path, kernels: path.mkdir(),
    lambda path, kernels: path.symlink_to(kernels.parent / "outside" / "canary"),
    lambda path, kernels: path.symlink_to(path),
    lambda path, kernels: os.mkfifo(path),
)


def odd_manifest_file(rng: random.Random, kernels: pathlib.Path) -> None:
    path, kind = kernels / "manifest.json", rng.randrange(1 + len(ODD_THINGS))
    if kind < len(ODD_THINGS):
        _free(path)
        ODD_THINGS[kind](path, kernels)
    elif path.is_file():
        os.truncate(path, 2**36)


def odd_binary(rng: random.Random, kernels: pathlib.Path) -> None:
    files = sorted(kernels.glob("sm_*/*.cubin"))
    if not files:
        return
    path, kind = rng.choice(files), rng.randrange(2 + len(ODD_THINGS))
    if kind < len(ODD_THINGS):
        _free(path)
        ODD_THINGS[kind](path, kernels)
    elif path.is_file() and kind == len(ODD_THINGS):
        os.truncate(path, 2**36)
    elif path.is_file():
        path.write_bytes(path.read_bytes()[: rng.randrange(20)])


def linked_folder(rng: random.Random, kernels: pathlib.Path) -> None:
    """A build's folder of one architecture that leads out of the folder of kernels."""
    path, outside = kernels / "sm_80", kernels.parent / "outside"
    if not path.is_symlink():
        for file in list(path.iterdir()):
            file.rename(outside / f"moved-{file.name}" if file.is_dir() else outside / file.name)
        path.rmdir()
        path.symlink_to(outside)


CHANGES: tuple[Callable[[random.Random, pathlib.Path], None], ...] = (
    other_name, other_name, other_name, other_number, other_number, other_text, other_list,
    without_field, other_rows, other_version, other_text_file, odd_manifest_file, odd_binary,
    linked_folder,
)  # fmt: skip


# ---- uses ----


def store(kernels: pathlib.Path) -> None:
    found = Store(kernels)
    for arch in (*found.archs, "sm_86", "gfx942", ""):
        found.arch_for(arch)
    for one in found:
        hash(one)
    found.verify()


def use_binaries(kernels: pathlib.Path) -> None:
    try:
        device.use_binaries(kernels)
    finally:
        device.use_binaries(None)


def build(kernels: pathlib.Path) -> None:
    """A build of nothing: what it finds is kept or removed."""
    aot.build({}, kernels, jobs=1)
    store(kernels)  # what it left is a folder that can be used


def read_earlier(kernels: pathlib.Path) -> None:
    for one in aot_folder.read(kernels):
        aot_folder.is_there(kernels, one)


USES = (store, use_binaries, build, build, build, read_earlier)
