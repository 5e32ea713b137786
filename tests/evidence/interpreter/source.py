"""Kernels' source as Python functions.

Nothing in triton is patched. The source is compiled as plain Python in a namespace where `tl` and
every other module is seen through `resolve`: built-in functions bound or replaced, `@triton.jit`
functions rewritten likewise, constants unwrapped.
"""

from __future__ import annotations

import ast
import types

from triton.language import core
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime.jit import ConstexprFunction, JITFunction

from .language import BUILTINS, ELEMENTARY, REPLACED, bound, reduce, scan, store
from .tensor import Tensor, semantic, takes


class Module:
    """A module as kernels see it."""

    def __init__(self, module) -> None:
        self._module = module

    def __getattr__(self, name):
        found = resolve(getattr(self._module, name))
        setattr(self, name, found)
        return found


class Device:
    """A @triton.jit function that can be called; rewritten at the first call."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel, self.function, self._call = kernel, kernel.fn, None

    def __call__(self, *arguments, **named):
        if self._call is None:
            self._call = _rewrite(self.kernel)
        return self._call(*arguments, **named)

    def __get__(self, instance, owner=None):  # a method of tensors: x.sum(0)
        return self if instance is None else types.MethodType(self, instance)


class _Plain(ast.NodeTransformer):
    """Kernel source without what only the compiler reads, and with its `and`, `or`, `not`."""

    def visit_FunctionDef(self, node):
        node.decorator_list, node.returns, node.args.defaults = [], None, []
        for argument in node.args.args:
            argument.annotation = None
        return self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        word = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        first, *others = node.values
        for value in others:
            second = ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)
            first = ast.Call(ast.Name("_truth", ast.Load()), [word, first, second], [])
        return first

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.Call(ast.Name("_not", ast.Load()), [node.operand], [])


def _rewrite(kernel: JITFunction):
    """The kernel as a Python function whose globals are resolved; tracebacks show its own lines."""
    tree = ast.fix_missing_locations(_Plain().visit(kernel.parse()))
    above = next(i for i, line in enumerate(kernel.raw_src) if line.lstrip().startswith("def "))
    ast.increment_lineno(tree, kernel.starting_line_number + above - 1)
    scope = dict(BUILTINS)
    exec(compile(tree, kernel.fn.__code__.co_filename, "exec"), scope)
    function = scope[kernel.fn.__name__]
    captured = kernel.get_capture_scope()
    for name in _names(function.__code__) & captured.keys():
        scope[name] = resolve(captured[name])
    defaults = kernel.fn.__defaults__ or ()
    function.__defaults__ = tuple(resolve(value) for value in defaults)
    return function


def _names(code: types.CodeType) -> set[str]:
    """Every global name (and attribute) that the code and its lambdas mention."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


_devices: dict[int, Device] = {}


def resolve(thing):
    """Anything that a kernel can name, as the interpreted kernel sees it."""
    if isinstance(thing, core.constexpr):
        return resolve(thing.value)
    if isinstance(thing, JITFunction):  # by id: hashing one hashes its whole source
        if id(thing) not in _devices:
            _devices[id(thing)] = Device(thing)
        return _devices[id(thing)]
    if isinstance(thing, ConstexprFunction):
        return thing.fn
    if isinstance(thing, types.ModuleType):
        return Module(thing)
    if type(thing) in (tuple, list):
        return type(thing)(resolve(item) for item in thing)
    if callable(thing):
        if thing in REPLACED:
            return REPLACED[thing]
        if getattr(thing, "__module__", None) == libdevice.__name__:
            return bound(getattr(cuda_libdevice, thing.__name__))
        if not isinstance(thing, type) and core.is_builtin(thing):
            return bound(thing)
    return thing


# ---- methods of tensors ----


def _operator(operation):
    """The methods for a + b with a tensor on the left, and on the right."""
    return lambda a, b: operation(a, b), lambda a, b: operation(b, a)


def _comparison(compare):
    """A Python number takes the tensor's type, or one of its own where that decides the result."""
    return lambda a, b: compare(a, b if takes(a, b) else semantic.to_tensor(b))


def _shift_right(a, b):
    return (semantic.ashr if a.dtype.is_int_signed() else semantic.lshr)(a, b)


for _name in dir(core.tensor):
    _member = getattr(core.tensor, _name)
    if core.is_builtin(_member) or isinstance(_member, JITFunction):
        if _name not in vars(Tensor):
            setattr(Tensor, _name, resolve(_member))
for _name, _function in {
    "add": lambda a, b: semantic.add(a, b, False),
    "sub": lambda a, b: semantic.sub(a, b, False),
    "mul": lambda a, b: semantic.mul(a, b, False),
    "truediv": semantic.truediv,
    "floordiv": semantic.floordiv,
    "mod": semantic.mod,
    "and": semantic.and_,
    "or": semantic.or_,
    "xor": semantic.xor_,
    "lshift": semantic.shl,
    "rshift": _shift_right,
}.items():
    _left, _right = _operator(_function)
    setattr(Tensor, f"__{_name}__", _left)
    setattr(Tensor, f"__r{_name}__", _right)
for _name, _function in {
    "lt": semantic.less_than,
    "le": semantic.less_equal,
    "gt": semantic.greater_than,
    "ge": semantic.greater_equal,
    "eq": semantic.equal,
    "ne": semantic.not_equal,
}.items():
    setattr(Tensor, f"__{_name}__", _comparison(_function))
for _name, _function in ELEMENTARY.items():
    setattr(Tensor, _name, _function)
Tensor.reduce, Tensor.associative_scan, Tensor.store = reduce, scan, store
Tensor.T = property(lambda self: semantic.permute(self, (1, 0)))
