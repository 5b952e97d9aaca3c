"""Column types of JSON Lines: for each key, one Arrow type that holds all its values, found by reading every value.

Types are not guessed: a text that looks like a date stays text. A key with values of different types (numbers and
texts, objects with different keys) becomes text, with non-text values kept as JSON, so that a prompt shows what the
file holds.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

MAX_KEYS = 10_000  # of a dataset; more suggest that data is stored in keys
_MAX_DEPTH = 16  # max nesting depth; deeper values become text
_EXACT = 2**53  # floats represent integers exactly up to here

# Kind of a key's values: None (only nulls), bool, int, float, str, _LONG (integers beyond _EXACT), ("list", inner),
# ("object", {key: inner}), or _MIXED.
_LONG, _MIXED = "long", "mixed"
_Kind = Any


class JsonTypes:
    """Kinds of the values seen so far, by key."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        kinds = self._kinds
        for key, value in row.items():
            kind = type(value)
            # skip the merge for the common case of a known kind; integers need a range check
            if key not in kinds or kind is not kinds[key] or kind is int:
                kinds[key] = _merged(kinds.get(key), _kind_of(value, 0))

    def add_all(self, others: "JsonTypes") -> None:
        for key, kind in others._kinds.items():
            self._kinds[key] = _merged(self._kinds.get(key), kind)

    def __len__(self) -> int:
        return len(self._kinds)

    def schema(self) -> pa.Schema:
        """Return the columns in the order of their first occurrence."""
        return pa.schema([(key, _arrow_type(kind)) for key, kind in self._kinds.items()])


def column_of(values: Iterable[Any], field: pa.Field) -> pa.Array:
    """Build a column of `schema` from the values of rows, None for a missing key."""
    if pa.types.is_string(field.type):
        values = [v if v is None or type(v) is str else _json(v) for v in values]
    return pa.array(values, field.type)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _kind_of(value: Any, depth: int) -> _Kind:
    if value is None or isinstance(value, bool | float | str):
        return None if value is None else type(value)
    if isinstance(value, int):
        if -_EXACT <= value <= _EXACT:
            return int
        return _LONG if -(2**63) <= value < 2**63 else _MIXED
    if depth == _MAX_DEPTH or value == {}:  # Parquet has no empty struct
        return _MIXED
    if isinstance(value, list):
        inner: _Kind = None
        for item in value:
            inner = _merged(inner, _kind_of(item, depth + 1))
        return _MIXED if inner is _MIXED else ("list", inner)
    fields = {key: _kind_of(item, depth + 1) for key, item in value.items()}
    return _MIXED if _MIXED in fields.values() else ("object", fields)


def _merged(a: _Kind, b: _Kind) -> _Kind:
    """Return the kind that holds the values of both. If a nested kind is mixed, the whole is mixed, so that a column
    has one form."""
    if a is None or b is None or a is b:
        return b if a is None else a
    if isinstance(a, tuple) and isinstance(b, tuple) and a[0] == b[0]:
        if a[0] == "list":
            inner = _merged(a[1], b[1])
            return _MIXED if inner is _MIXED else ("list", inner)
        if a[1].keys() == b[1].keys():
            fields = {key: _merged(kind, b[1][key]) for key, kind in a[1].items()}
            return _MIXED if _MIXED in fields.values() else ("object", fields)
        return _MIXED  # a struct would add keys that rows do not have
    if isinstance(a, tuple) or isinstance(b, tuple):
        return _MIXED
    if {a, b} == {int, float}:
        return float
    return _LONG if (a, b) in ((int, _LONG), (_LONG, int)) else _MIXED


def _arrow_type(kind: _Kind) -> pa.DataType:
    if isinstance(kind, tuple):
        shape, inner = kind
        if shape == "list":
            return pa.list_(_arrow_type(inner))
        return pa.struct([(key, _arrow_type(inner_kind)) for key, inner_kind in inner.items()])
    plain = {None: pa.null(), bool: pa.bool_(), int: pa.int64(), _LONG: pa.int64(), float: pa.float64()}
    return plain.get(kind, pa.string())
