"""The columns of JSON Lines: one Arrow type for each key that holds all of its values, found by looking at every value.

Nothing is guessed: a text that looks like a date stays text. A key whose values have no one type (numbers and texts,
objects with different keys) becomes text, its values that are not text as the JSON they are, so that a prompt has
what the file has.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

MAX_KEYS = 10_000  # of a dataset; more are data that somebody wrote as keys
_MAX_DEPTH = 16  # of a value that is not kept as text
_EXACT = 2**53  # integers up to here are floats too

# What a key's values are: None (only nulls), one of bool, int, float and str, _LONG (integers, some no float has),
# ("list", inner), ("object", {key: inner}), or _MIXED.
_LONG, _MIXED = "long", "mixed"
_Kind = Any


class JsonTypes:
    """What the values of each key were so far."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        kinds = self._kinds
        for key, value in row.items():
            kind = type(value)
            # most values are of the kind that is known; integers have a range
            if key not in kinds or kind is not kinds[key] or kind is int:
                kinds[key] = _merged(kinds.get(key), _kind_of(value, 0))

    def add_all(self, others: "JsonTypes") -> None:
        for key, kind in others._kinds.items():
            self._kinds[key] = _merged(self._kinds.get(key), kind)

    def __len__(self) -> int:
        return len(self._kinds)

    def schema(self) -> pa.Schema:
        """The columns, in the order in which they were met."""
        return pa.schema([(key, _arrow_type(kind)) for key, kind in self._kinds.items()])


def column_of(values: Iterable[Any], field: pa.Field) -> pa.Array:
    """A column of `schema`, from its values in some rows; a row that has none has None."""
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
    """The kind that holds the values of both. Mixed inside is mixed as a whole, so that one column has one form."""
    if a is None or b is None or a is b:
        return b if a is None else a
    if isinstance(a, tuple) and isinstance(b, tuple) and a[0] == b[0]:
        if a[0] == "list":
            inner = _merged(a[1], b[1])
            return _MIXED if inner is _MIXED else ("list", inner)
        if a[1].keys() == b[1].keys():
            fields = {key: _merged(kind, b[1][key]) for key, kind in a[1].items()}
            return _MIXED if _MIXED in fields.values() else ("object", fields)
        return _MIXED  # as a struct, rows would get keys that they do not have
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
        return pa.struct([(key, _arrow_type(of)) for key, of in inner.items()])
    plain = {None: pa.null(), bool: pa.bool_(), int: pa.int64(), _LONG: pa.int64(), float: pa.float64()}
    return plain.get(kind, pa.string())
