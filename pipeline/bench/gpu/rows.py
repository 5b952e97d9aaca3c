"""Dataclasses from what `asdict` made of them and JSON carried."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def rows_of(kind: type[T], told: Iterable[Mapping[str, Any]]) -> tuple[T, ...]:
    """What is beside the fields of `kind` is left out; lists of values become tuples."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return tuple(kind(**{name: _frozen(row[name]) for name in names if name in row}) for row in told)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
