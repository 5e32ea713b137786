"""Who may know whom: imports point downwards, and nobody reads another module's private names."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "vitkern"

# A row for each module and package of vitkern/, from the top down, with those below it that it may
# import. A module belongs to the longest name that fits: gpu/aot/build.py to gpu.aot. To add a
# module, add its row above everything that it imports and name it in the rows of those who import
# it. A string that names a module ("vitkern.cpu:layernorm") is no import, nor is one for type
# checkers: backends are loaded by their first call.
MAY_IMPORT = {
    "__main__": "cli __init__",
    "cli": "__init__ doctor bench verification embedding exporting serve train train.data measure"
    " engines.trace opening trained_file packed_file weights predictor contact_sheet"
    " image_sources image_files inspection config names registry contract terminal gpu.aot"
    " gpu.runtime gpu cpu cpu_threads _C",
    "doctor": "__init__ measure terminal gpu.runtime gpu cpu cpu_threads cpu_limits _C",
    "bench": "__init__ measure model config contract cpu precision",
    "embedding": "__init__ opening image_sources image_files packed_file model weights config"
    " cpu_limits",
    "exporting": "model",
    "serve": "__init__ predictor image_files inspection",
    "predictor": "image_files",
    "__init__": "",  # the front door names modules by strings: importing vitkern loads nothing
    "train": "train.data measure trained_file loading model weights weights.layouts image_files"
    " config",
    "opening": "trained_file packed_file loading image_files model weights config",
    "trained_file": "loading model weights weights.layouts config",
    "contact_sheet": "",
    "image_sources": "image_files",
    "train.data": "image_files",
    "measure": "cpu precision _C",
    "terminal": "",
    "verification": "model engines quantisation ops config registry contract precision cpu",
    "acceleration": "foreign model engines precision",
    "foreign": "model engines ops config names",
    "quantisation": "model int8",
    "loading": "model packed_file weights weights.layouts positions config precision",
    "packed_file": "saving model dispatch engines int8 config cpu packing panels _C",
    "saving": "model weights weights.layouts config",
    "engines.trace": "model engines config gpu precision",
    "model": "model_tools packed weight_memory timm_api timm_keywords dispatch engines"
    " head blocks layers ops positions relative rotary config precision",
    "model_tools": "inspection summary explanation dispatch",
    "inspection": "layers",
    "packed": "dispatch layers",
    "timm_api": "timm_keywords timm_cfg layers positions config",
    "timm_keywords": "config",
    "timm_cfg": "config",
    "weight_memory": "dispatch engines positions",
    "summary": "config stem",
    "explanation": "dispatch gpu.runtime cpu precision",
    "dispatch": "engines config precision",
    "engines": "blocks layers positions config registry precision int8 gpu.runtime gpu"
    " cpu packing panels _C",
    "head": "layers config precision",
    "blocks": "layers ops config philox",
    "layers": "ops positions relative rotary config philox stem",
    "stem": "resnets config",
    "resnets": "",
    "relative": "positions config precision",
    "rotary": "config",
    "weights": "weights.layouts positions config",
    "weights.layouts": "positions config",
    "ops": "registry precision philox",
    "image_files": "",
    "positions": "config",
    "config": "names",
    "names": "family_names names_rotary",
    "family_names": "",
    "names_rotary": "",
    "registry": "contract",
    "contract": "precision",
    "gpu.aot": "gpu",
    "gpu.runtime": "gpu _C",
    "gpu": "precision philox",
    "cpu_backward": "cpu cpu_blas cpu_threads operands _C",
    "cpu": "cpu_blas cpu_threads operands packing _C",
    "cpu_blas": "cpu_threads operands _C",
    "cpu_threads": "cpu_limits _C",
    "cpu_limits": "",
    "operands": "packing philox _C",
    "packing": "_C",
    "panels": "",
    "int8": "",
    "precision": "",
    "philox": "",
    "_C": "",
}
# Imports that point upwards all the same, inside functions, each with its reason.
UPWARDS = {
    ("model_tools", "loading"): "ViT.from_pretrained, whose model it builds",
    ("model_tools", "packed_file"): "ViT.save_packed, whose file holds a model's configuration",
    ("engines.base", "model"): "the shapes a model would have, from one without memory",
    ("gpu.launch", "gpu.runtime"): "what starts a launch by default, found at the first one",
}


def rows() -> dict[str, set[str]]:
    return {name: set(below.split()) for name, below in MAY_IMPORT.items()}


def module_of(path: pathlib.Path) -> str:
    """cli/demo.py is cli.demo, gpu/__init__.py is gpu, and the package's own is __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = sorted(path for path in PACKAGE.rglob("*.py"))
MODULES = {module_of(path): path for path in FILES}


def layer_of(module: str) -> str:
    """The longest row that a module is or is inside of; "" where there is none."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in prefixes if name in MAY_IMPORT), "")


# ---- Imports -------------------------------------------------------------------------------------


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of the tree that runs: an import for type checkers only is no dependency."""
    yield node
    children = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from run_time_nodes(child)


def imported_names(path: pathlib.Path) -> Iterator[list[str]]:
    """What a file imports, in full: ["vitkern", "ops", "mlp"]."""
    package = ["vitkern", *path.relative_to(PACKAGE).parts[:-1]]
    for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            yield from ([*stem, alias.name] for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)


def imported_modules(path: pathlib.Path) -> set[str]:
    """The modules of vitkern that a file imports; a name inside one counts as that module."""
    found = set()
    for name in imported_names(path):
        if name[0] == "vitkern":
            inside = name[1:]
            while inside and ".".join(inside) not in {*MODULES, "_C"}:
                inside = inside[:-1]
            found.add(".".join(inside) or "__init__")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    layer = layer_of(module)
    found = {layer_of(name) for name in imported_modules(MODULES[module])} - {layer}
    excused = {above for who, above in UPWARDS if who == module}
    wrong = found - rows()[layer] - excused
    assert not wrong, f"{module} is of the layer {layer!r}, which may not import {sorted(wrong)}"


def test_the_table_points_downwards():
    order = list(MAY_IMPORT)
    for layer, below in rows().items():
        unknown = below - set(order)
        assert not unknown, f"{layer} may import {unknown}, which have no row"
        above = [name for name in below if order.index(name) <= order.index(layer)]
        assert not above, f"{layer} stands below {above}: move its row up"


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_every_row_names_a_module(layer):
    assert layer in MODULES or layer == "_C", f"vitkern.{layer} does not exist: remove its row"


def test_every_module_has_a_row():
    """Its own for a file of vitkern/, its package's for the others: no row stands for the rest."""
    packages = {".".join(name.split(".")[:-1]) or name for name in MODULES}
    missing = sorted(name for name in packages if name not in MAY_IMPORT)
    assert not missing, f"add rows to MAY_IMPORT for {missing}"


def test_upward_imports_are_still_needed():
    for (module, above), reason in UPWARDS.items():
        found = {layer_of(name) for name in imported_modules(MODULES[module])}
        assert above in found, f"{module} no longer imports {above} ({reason}): remove its row"


# ---- Private names -------------------------------------------------------------------------------

# Of torch, where there is no public way to ask, and of the standard library's public interface.
FOREIGN = {
    "torch": "_C _cuda_getCurrentRawStream _functorch _assert_async _current_level"
    " _has_any_global_hook _is_zerotensor"
    " _len_torch_dispatch_stack _version",
    "torch.nn.Module": "_forward_hooks _forward_pre_hooks _modules _parameters",
    "namedtuple": "_asdict _fields _replace",
    "os": "_exit",
}
FOREIGN_NAMES = {name for names in FOREIGN.values() for name in names.split()}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines or imports: functions, classes, variables and attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_self(node.value) else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[-1] for alias in node.names}
    return found


def is_self(node: ast.AST) -> bool:
    """self, cls or super()."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in {"self", "cls", "super"}


def private_reads(source: str) -> set[str]:
    """Private attributes of others that a file reads or writes."""
    tree = ast.parse(source)
    allowed = own_names(tree) | FOREIGN_NAMES
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in attributes
        if is_private(node.attr) and node.attr not in allowed and not is_self(node.value)
    }


@pytest.mark.parametrize("module", MODULES)
def test_nobody_reads_another_module_s_private_names(module):
    found = private_reads(MODULES[module].read_text(encoding="utf-8"))
    assert not found, f"vitkern.{module} reads {sorted(found)}: ask for it by a public name"


@pytest.mark.parametrize(
    "source, found",
    [
        ("model._watch()", {"_watch"}),
        ("from x import other\nother._secret = 3", {"_secret"}),
        ("self._own = other._own", set()),
        ("def _here(): pass\nmodule._here()", set()),
        ("torch._C.x, row._replace(a=1), x.__class__, super()._apply(f)", set()),
    ],
)
def test_private_reads_are_seen(source, found):
    assert private_reads(source) == found
