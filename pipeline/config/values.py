"""The kinds of value a job file's keys take, each with the words for what was expected.

pydantic is strict here (no text is taken for a number); these types add what people write all the same:
`off` and `yes` for switches, `8 GiB` for sizes, one text where a list is meant, `{column: name}` for each
row's own value. Each also says in JSON Schema what it takes, which pydantic cannot see in a function.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline.checkpoints.locate import EMBEDDED_MODELS

_SWITCH = {"on": True, "yes": True, "off": False, "no": False}
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d)")

# For editors: as much of the above as a pattern can say. None refuses what is accepted.
_SWITCH_PATTERN = "^([oO][nN]|[oO][fF][fF]|[yY][eE][sS]|[nN][oO])$"
_SIZE_PATTERN = r"^\s*[0-9][0-9_]*(\.[0-9]+)?\s*(([kKmMgGtT][iI]?)?[bB])?\s*$"  # many editors read 8_000 as text
_DURATION_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*(s|min|m|h|d)\s*$"
_MOMENT_PATTERN = r"^[0-9]{4}-?(W?[0-9]{2})[^Zz+]*$"


UNION_TAGS = ("<word>", "<options>")  # in the place of an error where a key takes either; no key is called so


@dataclass(frozen=True)
class FromColumn:
    """A sampling value that every row brings in a column of its own."""

    column: str


def _refuse(expected: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "{expected}", {"expected": expected})


def _switch(value: object) -> object:
    return _SWITCH.get(value.lower(), value) if isinstance(value, str) else value


def _auto_or_switch(value: object) -> object:
    value = _switch(value)
    if value != "auto" and not isinstance(value, bool):
        raise _refuse("auto, true or false")
    return value


def parse_bytes(text: str) -> int | None:
    """`8 GiB` as a number of bytes; None where the text is no size."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    return int(float(match[1]) * factor) if match and factor is not None else None


def _bytes(value: object) -> object:
    if isinstance(value, str) and (size := parse_bytes(value)) is not None:
        return size
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _refuse("a number of bytes, such as 8_000_000 or 8 GiB")


def parse_duration(text: str) -> float | None:
    """`90 min` in seconds; None where the text is no duration."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def _duration(value: object) -> object:
    if isinstance(value, str) and (seconds := parse_duration(value)) is not None:
        return seconds
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _refuse("a duration, such as 90 min or 6 h, or a number of seconds")


def _moment(value: object) -> object:
    """As ISO text, from such a text or from what YAML libraries make of one; a date alone is its midnight."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day)
    if not isinstance(moment, datetime) or moment.tzinfo is not None:
        raise _refuse('a date, such as 2026-11-23, or with a time, "2026-11-23 14:05"; without a time zone')
    return moment.isoformat()


def _listed(value: object) -> object:
    """A tuple from a list, and from one text alone."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _no_login(path: str) -> str:
    """S3's and GCS's libraries know no user in a url: they take it for the bucket's name, and messages show it."""
    scheme, _, rest = path.partition("://")
    if rest and scheme in ("s3", "s3a", "gs", "gcs") and "@" in rest.partition("/")[0]:
        raise ValueError("a bucket's url holds no user or password: put them under `storage`, or in the environment")
    return path


def _on_one_line(path: str) -> str:
    """YAML's `|` and `>` end a text with a line break, which would become part of a folder's name."""
    if re.search(r"[\x00-\x1f\x7f]", path):
        raise ValueError(f"expected a path on one line, without control characters, not {path[:200]!r}")
    return path


def _embedded_exists(path: str) -> str:
    if path.startswith("demo:") and path not in EMBEDDED_MODELS:
        raise ValueError(f"no embedded model {path!r}: expected {', '.join(EMBEDDED_MODELS)}")
    return path


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise _refuse(f"each column once; {name!r} is named twice")
    return names


def _or_column(
    is_right: Callable[[Any], bool],
    expected: str,
    schema: dict[str, Any],
    prepare: Callable[[Any], Any] = lambda value: value,
) -> tuple[PlainValidator, PlainSerializer, WithJsonSchema]:
    """A value that `is_right` once it is prepared, or {column: name}; `schema` is the value's JSON Schema."""

    def validate(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) != {"column"} or not isinstance(value["column"], str) or not value["column"]:
                raise _refuse("a value, or {column: name} to take it from each row")
            return FromColumn(value["column"])
        if isinstance(value, FromColumn):
            return value
        value = prepare(value)
        if not is_right(value):
            raise _refuse(f"{expected}, or {{column: name}}")
        return value

    return PlainValidator(validate), PlainSerializer(_plain), WithJsonSchema({"anyOf": [schema, COLUMN_SCHEMA]})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: object) -> object:
    return {"column": value.column} if isinstance(value, FromColumn) else value


def false_is_off(written: Any) -> BeforeValidator:
    """Takes `false` for `off`; `written` is the type of what the key takes besides."""
    return BeforeValidator(
        lambda value: "off" if value is False else value, json_schema_input_type=written | Literal[False]
    )


_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
COLUMN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Each row's own value, from this column of the input.",
    "properties": {"column": {**_TEXT_SCHEMA, "description": "The column's name.", "examples": ["budget"]}},
    "required": ["column"],
    "additionalProperties": False,
}
_SWITCH_SCHEMA = {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": _SWITCH_PATTERN}]}
_BYTES_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _SIZE_PATTERN}]}
_DURATION_SCHEMA = {
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": _DURATION_PATTERN}]
}
_COLUMNS_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "uniqueItems": True}]}
_STRINGS_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA}]}
_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}

Switch = Annotated[bool, BeforeValidator(_switch), WithJsonSchema(_SWITCH_SCHEMA)]
AutoOrSwitch = Annotated[
    Literal["auto"] | bool,
    PlainValidator(_auto_or_switch),
    WithJsonSchema({"anyOf": [{"const": "auto"}, *_SWITCH_SCHEMA["anyOf"]]}),
]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1), WithJsonSchema(_BYTES_SCHEMA)]
# In seconds.
Duration = Annotated[
    float,
    BeforeValidator(_duration),
    Field(gt=0, le=31_536_000, allow_inf_nan=False),
    WithJsonSchema(_DURATION_SCHEMA),
]
# A local wall time in ISO form.
Moment = Annotated[str, BeforeValidator(_moment), WithJsonSchema({"type": "string", "pattern": _MOMENT_PATTERN})]
# A path or an fsspec url
Place = Annotated[str, Field(min_length=1), AfterValidator(_on_one_line), AfterValidator(_no_login)]
ModelPlace = Annotated[Place, AfterValidator(_embedded_exists)]  # or a Hugging Face id, or an embedded model
Column = Annotated[str, Field(min_length=1)]
Columns = Annotated[
    tuple[Column, ...], BeforeValidator(_listed), AfterValidator(_distinct), WithJsonSchema(_COLUMNS_SCHEMA)
]

IntOrColumn = Annotated[int | FromColumn, *_or_column(_is_int, "an integer", {"type": "integer"})]
IntOrNoneOrColumn = Annotated[
    int | FromColumn | None,
    *_or_column(lambda v: v is None or _is_int(v), "an integer", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
]
NumberOrColumn = Annotated[
    float | FromColumn,
    *_or_column(
        lambda v: isinstance(v, float), "a number", {"type": "number"}, lambda v: float(v) if _is_int(v) else v
    ),
]
SwitchOrColumn = Annotated[
    bool | FromColumn, *_or_column(lambda v: isinstance(v, bool), "true or false", _SWITCH_SCHEMA, _switch)
]
StringsOrColumn = Annotated[
    tuple[str, ...] | FromColumn,
    *_or_column(
        lambda v: isinstance(v, tuple) and all(isinstance(item, str) for item in v),
        "a list of texts (quote numbers)",
        _STRINGS_SCHEMA,
        _listed,
    ),
]
TextOrColumn = Annotated[
    str | FromColumn | None,
    *_or_column(
        lambda v: v is None or (isinstance(v, str) and v != ""),
        "text",
        {"anyOf": [_TEXT_SCHEMA, {"type": "null"}]},
    ),
]
TokenIdsOrColumn = Annotated[
    tuple[int, ...] | FromColumn,
    *_or_column(
        lambda v: isinstance(v, tuple) and all(map(_is_int, v)), "a list of token ids", _TOKEN_IDS_SCHEMA, _listed
    ),
]
