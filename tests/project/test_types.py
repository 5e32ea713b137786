"""The type hints: complete where users look, and true where they describe C++."""

import ast
import inspect
import typing

import pytest

import vitkern
from tests.conftest import ROOT
from vitkern import ops

_C = pytest.importorskip("vitkern._C")
STUB = ast.parse((ROOT / "vitkern" / "_C.pyi").read_text(encoding="utf-8"))


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> set[str]:
    """Functions, classes and attributes that a module or a class of the stub declares."""
    found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return public(found | {n.target.id for n in body if isinstance(n, ast.AnnAssign)})


def test_the_stub_names_what_the_extension_has():
    assert declared(STUB.body) == public(dir(_C))


CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("name", sorted(public(CLASSES)))
def test_the_stub_s_classes_have_those_attributes(name):
    node = CLASSES[name]
    inherited = [CLASSES[base.id].body for base in node.bases if base.id in CLASSES]
    found = set().union(*map(declared, [node.body, *inherited]))
    assert found == public(vars(getattr(_C, name)))


def public_functions() -> list:
    functions = [getattr(ops, name) for name in ops.__all__]
    for owner in (vitkern.ViT, vitkern.ViTConfig):
        functions += [getattr(owner, name) for name in sorted(public(dir(owner)))]
    ours = [f for f in functions if str(getattr(f, "__module__", "")).startswith("vitkern")]
    return [vitkern.accelerate, *filter(inspect.isroutine, ours)]


@pytest.mark.parametrize("function", public_functions(), ids=lambda f: f.__qualname__)
def test_public_functions_are_annotated(function):
    hints = function.__annotations__
    bare = [name for name in inspect.signature(function).parameters if name not in hints]
    assert bare in ([], ["self"]) and "return" in hints


def test_annotations_name_what_exists():
    for function in (vitkern.accelerate, vitkern.ViT.__init__, vitkern.ViTConfig.named):
        assert typing.get_type_hints(function)


def test_the_marker_is_there():
    assert (ROOT / "vitkern" / "py.typed").read_bytes() == b""
