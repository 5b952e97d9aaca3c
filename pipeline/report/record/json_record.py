"""Frozen dataclasses as plain values, ready for json.dumps, and back by the types of their fields.

Unknown keys are ignored, and a field whose key is absent has its default.
"""

import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1  # of the records that a run leaves: grows when a key goes or means something else


class JsonRecord:
    """Gives a dataclass both ways."""

    def to_json(self) -> dict[str, Any]:
        """Plain values. json.dumps makes text of numbers that are keys; `from_json` reads them as numbers."""
        return asdict(self)  # pyright: ignore[reportArgumentType]  # of dataclasses only

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return _read(cls, raw)


_hints = cache(get_type_hints)


def _read(kind: Any, raw: Any) -> Any:
    """`raw` as a value of the type `kind`: dataclasses, optional ones, and lists, tuples and mappings of them."""
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{f.name: _read(hints[f.name], raw[f.name]) for f in fields(kind) if f.name in raw})  # pyright: ignore
    origin, of = get_origin(kind), get_args(kind)
    if raw is None:
        return None
    if origin in (Union, types.UnionType):
        return _read(next(each for each in of if each is not type(None)), raw)
    if origin in (list, tuple):
        return origin(_read(of[0], each) for each in raw)
    if origin in (dict, Mapping):
        return {int(key) if of[0] is int else key: _read(of[1], value) for key, value in raw.items()}
    return raw
