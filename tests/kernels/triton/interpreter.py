"""Triton's interpreter without needless work, which takes two thirds of the time of these tests.

Each launch, and each function that a kernel calls, lists all members of `triton.language` to find the few that it
replaces, although the launch has replaced them already. Each sum and product of integers is computed again in 64 bits
and compared with the type's range, for an assertion in debug mode only. Each operation builds the table of numpy's
types anew. Each block has its own type, whose shape is checked, named and converted to constants again. Each operation
searches its operands' types by name for the type of the result, and finds the shape of the result element by element.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Patch the interpreter: remember the members of Triton that it replaces and restores, do so once a launch, prepare
    no assertions that are off, and remember types."""
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if not hasattr(interpreter, "_get_np_dtype") or not hasattr(options, "sanitize_overflow"):
        return  # another version of Triton: slower, but correct
    names: dict[int, list[str]] = {}

    def getmembers(owner: Any) -> list[tuple[str, Any]]:
        if id(owner) not in names:
            names[id(owner)] = [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]
        return [(name, getattr(owner, name)) for name in names[id(owner)]]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})  # type: ignore[assignment]
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_type_of = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name  # types of blocks and pointers cannot be keys themselves
        if name not in known:
            known[name] = numpy_type_of(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)
    remember_shapes()
    remember_results()


def once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patch the modules of a kernel and its functions once, until the launch ends. Only the launch's own scope restores
    them."""
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
    """Share the shape, and the constants that a tensor stores it in, among blocks of one shape."""
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
            constant_shape = tl.core.tuple([tl.core.constexpr(size) for size in shape])
            constants[id(shape)] = shape, constant_shape, tl.core.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = constants[id(shape)]

    block_type.__init__, tensor.__init__ = of_block, of_tensor


def remember_results() -> None:
    """Return operands that have the type and shape of the result at once, and remember the results of others."""
    block_type, computation_type = tl.core.block_type, TritonSemantic.computation_type_impl
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
    # By the identities of shapes, which `remember_shapes` keeps.
    blocks: dict[tuple[int, str], Any] = {}
    results: dict[tuple[int, int], tuple[Any, Any]] = {}
    types: dict[tuple[Any, ...], Any] = {}

    def block_of(shape: Any, element_ty: Any) -> Any:
        key = id(shape), element_ty.name
        if key not in blocks:
            blocks[key] = block_type(element_ty, shape)
        return blocks[key]

    def in_shape(value: Any, shape: Any) -> Any:
        if value.type.is_block() and value.type.shape is shape:
            return value
        data, dtype, sizes = value.handle.data, value.dtype, tuple(shape)
        data = np.broadcast_to(data, sizes) if value.type.is_block() else np.full(sizes, data, data.dtype)
        return tl.core.tensor(interpreter.TensorHandle(data, dtype), block_of(shape, dtype))

    def broadcast_others(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        if not (a.type.is_block() and b.type.is_block()):
            shape = a.type.shape if a.type.is_block() else b.type.shape if b.type.is_block() else None
            return (a, b) if shape is None else (in_shape(a, shape), in_shape(b, shape))
        if a.type.shape is b.type.shape:
            return a, b
        if len(a.type.shape) != len(b.type.shape):
            return broadcast(self, a, b)
        key = id(a.type.shape), id(b.type.shape)
        if key not in results:
            wide_a, wide_b = broadcast(self, a, b)
            results[key] = wide_a.type.shape, wide_b.type.shape
        return in_shape(a, results[key][0]), in_shape(b, results[key][1])

    def cast_others(self: Any, value: Any, type: Any, *rounding: Any, **options: Any) -> Any:
        return value if value.dtype is type.scalar else cast(self, value, type, *rounding, **options)

    def remembered_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in types:
            types[key] = computation_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return types[key]

    block_type.with_element_ty = lambda self, element_ty: block_of(self.shape, element_ty)
    TritonSemantic.cast, TritonSemantic.broadcast_impl_value = cast_others, broadcast_others
    TritonSemantic.computation_type_impl = remembered_type
