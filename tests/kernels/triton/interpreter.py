"""Triton's interpreter without work that it does for nothing, two thirds of the time of these tests.

Each launch, and each function that a kernel calls, lists all members of `triton.language` to find the few that it
replaces, though the launch has replaced them for the functions. Each sum and product of integers is computed once more
in 64 bits and compared with what the type can hold, for an assertion that is made in debug mode only. Each operation
writes down the table of numpy's types anew. And each block has a type of its own, with the shape checked, named and
made of constants again.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def spare_the_interpreter() -> None:
    """Let it look at those members alone that were Triton's own when it first looked: it goes on to replace and to
    restore them as it does, once a launch. Let it prepare no assertions that it does not make, and remember types."""
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if not hasattr(interpreter, "_get_np_dtype") or not hasattr(options, "sanitize_overflow"):
        return  # a Triton that is made otherwise: slower, and as right
    names: dict[int, list[str]] = {}

    def getmembers(of: Any) -> list[tuple[str, Any]]:
        if id(of) not in names:
            names[id(of)] = [name for name, member in inspect.getmembers(of) if tl.core.is_builtin(member)]
        return [(name, getattr(of, name)) for name in names[id(of)]]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})  # type: ignore[assignment]
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_type_of = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(of: Any) -> Any:
        name = of.scalar.name  # types of blocks and pointers cannot be keys themselves
        if name not in known:
            known[name] = numpy_type_of(of)
        return known[name]

    interpreter._get_np_dtype = remembered
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)
    remember_shapes()


def once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The modules that a kernel or a function of it sees are patched until the launch ends, so the functions that it
    calls later find them so. Only the launch's own scope is ever restored."""
    patched: set[int] = set()
    seen: dict[int, set[int]] = {}  # by function: the modules of Triton among its globals

    def patch_once(function: Any) -> Any:
        code = id(function.__code__)
        if code not in seen:
            among = list(function.__globals__.values())
            seen[code] = {id(module) for module in (tl, tl.core) if any(each is module for each in among)}
        if seen[code] <= patched:
            return interpreter._LangPatchScope()
        scope, is_launch = patch(function), not patched
        patched.update(seen[code])
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    return patch_once


def remember_shapes() -> None:
    """Blocks of one shape share it, and the constants that a tensor tells it in."""
    block_type, tensor = tl.core.block_type, tl.core.tensor
    check_and_name = block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
    names: dict[tuple[tuple[int, ...], str], str] = {}
    constants: dict[int, tuple[Any, Any, Any]] = {}  # by the shape's identity, which is kept with them

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([getattr(size, "value", size) for size in shape])
        name = (key, element_ty.name)
        if name not in names:
            check_and_name(self, element_ty, shape)
            shapes.setdefault(key, (self.shape, self.numel))
            names[name] = self.name
        self.element_ty, self.name = element_ty, names[name]
        self.shape, self.numel = shapes[key]

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if id(shape) not in constants:
            told = tl.core.tuple([tl.core.constexpr(size) for size in shape])
            constants[id(shape)] = shape, told, tl.core.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = constants[id(shape)]

    block_type.__init__, tensor.__init__ = of_block, of_tensor
