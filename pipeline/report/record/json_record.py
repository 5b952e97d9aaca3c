"""Conversion of frozen dataclasses to plain values for json.dumps, and back by the types of their fields.

Unknown keys are ignored; a missing key gives the field's default.
"""

import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1  # of run records; incremented when a key is removed or changes its meaning


class JsonRecord:
    """Mixin that converts a dataclass to JSON and back."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values. json.dumps turns integer keys into text; `from_json` converts them back."""
        return asdict(self)  # pyright: ignore[reportArgumentType]  # subclasses are dataclasses

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return _read(cls, raw)


_hints = cache(get_type_hints)


def _read(kind: Any, raw: Any) -> Any:
    """Convert `raw` to the type `kind`: dataclasses, optional ones, and lists, tuples and mappings of them."""
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{f.name: _read(hints[f.name], raw[f.name]) for f in fields(kind) if f.name in raw})  # pyright: ignore
    origin, args = get_origin(kind), get_args(kind)
    if raw is None:
        return None
    if origin in (Union, types.UnionType):
        return _read(next(each for each in args if each is not type(None)), raw)
    if origin in (list, tuple):
        return origin(_read(args[0], each) for each in raw)
    if origin in (dict, Mapping):
        return {int(key) if args[0] is int else key: _read(args[1], value) for key, value in raw.items()}
    return raw
