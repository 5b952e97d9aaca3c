"""Triton's interpreter without work that it does for nothing, some 40% of the time of these tests.

Each launch, and each function that a kernel calls, lists all members of `triton.language` to find the few that it
replaces. Each sum and product of integers is computed once more in 64 bits and compared with what the type can hold,
for an assertion that is made in debug mode only. And each operation writes down the table of numpy's types anew.
"""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def spare_the_interpreter() -> None:
    """Let it look at those members alone that were Triton's own when it first looked: it goes on to replace and to
    restore them as it does, each time. Let it prepare no assertions that it does not make, and remember types."""
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
