"""Types of the values in a job file, each with its error message.

pydantic runs in strict mode (text is never parsed as a number); these types add the forms that people write: `off` and
`yes` for switches, `8 GiB` for sizes, `6 h` for durations, one text for a list of one, `{column: name}` for a value per
row. Each type states the JSON Schema that pydantic cannot derive from a function.
"""

import re
from datetime import date, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline.checkpoints.adapters import EMBEDDED_ADAPTERS
from pipeline.checkpoints.locate import EMBEDDED_MODELS
from pipeline.data.conditions import Condition
from pipeline.errors import ConfigError

MAX_ACTORS = 100_000
_SWITCH = {"on": True, "yes": True, "off": False, "no": False}
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_PART_OF_DURATION = r"[0-9]+(?:\.[0-9]+)?\s*(?:s|min|m|h|d)"
_DURATION = re.compile(rf"{_PART_OF_DURATION}(?:\s+{_PART_OF_DURATION})*")
_EXAMPLES_OF_DURATION = "90 s, 30 min, 6 h or 1 h 30 min"

# For editors: what a pattern can express of the above. No pattern rejects an accepted value.
_SWITCH_PATTERN = "^([oO][nN]|[oO][fF][fF]|[yY][eE][sS]|[nN][oO])$"
_SIZE_PATTERN = r"^\s*[0-9][0-9_]*(\.[0-9]+)?\s*(([kKmMgGtT][iI]?)?[bB])?\s*$"  # many editors read 8_000 as text
_MOMENT_PATTERN = r"^[0-9]{4}-?(W?[0-9]{2})[^Zz+]*$"

# Tags of unions in the path of an error, removed from messages. No key has these names.
VALUE, COLUMN = UNION_TAGS = ("<value>", "<column>")

# Resume classes (`identity.py`): what a changed key means for a run that resumes an output. No mark: free to change.
IDENTITY: Any = {"resume": "identity"}  # refused
NUMERICS: Any = {"resume": "numerics"}  # may change tokens by rounding: refused unless accepted
HIDDEN: Any = {"resume": "hidden"}  # free, and not recorded, since it may contain a secret


class ConfigSection(BaseModel):
    """Mapping in a job file: frozen, refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class FromColumn(ConfigSection):
    """A value per row, from a column of the input."""

    column: str = Field(min_length=1, description="Name of the column.", examples=["budget"])


T = TypeVar("T")
PerRow = Annotated[
    Annotated[T, Tag(VALUE)] | Annotated[FromColumn, Tag(COLUMN)],
    Discriminator(lambda value: COLUMN if isinstance(value, dict | FromColumn) else VALUE),
]
"""A value, the same for all rows, or `{column: name}`."""


def _refuse(expected: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "{expected}", {"expected": expected})


def _switch(value: object) -> object:
    return _SWITCH.get(value.lower(), value) if isinstance(value, str) else value


def _auto_or_switch(value: object) -> object:
    value = _switch(value)
    if value != "auto" and not isinstance(value, bool):
        raise _refuse("auto, true or false")
    return value


def _actors(value: object) -> object:
    sizes: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value, value)
    are_counts = all(type(size) is int and 1 <= size <= MAX_ACTORS for size in sizes)
    if len(sizes) != 2 or not are_counts or sizes[0] > sizes[1]:
        raise _refuse(f"a number from 1 to {MAX_ACTORS:,}, or [MIN, MAX]")
    return sizes if isinstance(value, list | tuple) else value


def parse_bytes(text: str) -> int | None:
    """Return the number of bytes of a size such as `8 GiB`; None if the text is not a size."""
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
    """Return the seconds of a duration such as `1 h 30 min`; None if the text is not a duration."""
    if _DURATION.fullmatch(text.strip()) is None:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([0-9.]+)\s*([a-z]+)", text))


def _duration(value: object) -> object:
    if isinstance(value, str) and (seconds := parse_duration(value)) is not None:
        return seconds
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        raise _refuse(f"a duration with its unit, such as `{value:g} s`")
    raise _refuse(f"a duration, such as {_EXAMPLES_OF_DURATION}")


def _moment(value: object) -> object:
    """Return ISO text for ISO text or a date of a YAML library; a date without a time is its midnight."""
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
    """Return a tuple of the items of a list, or of one text."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _no_login(path: str) -> str:
    """Refuse a user in a bucket's url: S3's and GCS's libraries take it for the bucket, and messages would show it."""
    scheme, _, rest = path.partition("://")
    if rest and scheme in ("s3", "s3a", "gs", "gcs") and "@" in rest.partition("/")[0]:
        raise ValueError(
            "a bucket's url cannot contain a user or password: put them under `storage_options`, or in the environment"
        )
    return path


def _on_one_line(path: str) -> str:
    """Refuse control characters: YAML's `|` and `>` end a text with a newline, which would be part of the path."""
    if re.search(r"[\x00-\x1f\x7f]", path):
        raise ValueError(f"expected a path on one line, without control characters, not {path[:200]!r}")
    return path


def _embedded_exists(path: str) -> str:
    if path.startswith("demo:") and path not in EMBEDDED_MODELS:
        raise ValueError(f"no embedded model {path!r}: expected {', '.join(EMBEDDED_MODELS)}")
    return path


def _embedded_adapter_exists(path: str) -> str:
    if path.startswith("demo:") and path not in EMBEDDED_ADAPTERS:
        raise ValueError(f"no embedded adapter {path!r}: expected {', '.join(EMBEDDED_ADAPTERS)}")
    return path


def _condition(text: str) -> str:
    try:
        Condition.parse(text, "condition")
    except ConfigError as error:
        raise ValueError(error.problem("condition")) from None
    return text


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise _refuse(f"each column once; {name!r} is repeated")
    return names


def false_is_off(written: Any) -> BeforeValidator:
    """Accept `false` for `off`. written: type of the other values."""
    return BeforeValidator(
        lambda value: "off" if value is False else value, json_schema_input_type=written | Literal[False]
    )


def or_word(key: str, section: Any, word: Any = str) -> BeforeValidator:
    """Accept a bare word, or YAML's false for `off`, as `{key: word}`, with defaults for the section's other keys."""
    return BeforeValidator(
        lambda value: {key: value} if isinstance(value, str) or value is False else value,
        json_schema_input_type=section | word,
    )


_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_SWITCH_SCHEMA = {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": _SWITCH_PATTERN}]}
_BYTES_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _SIZE_PATTERN}]}
_DURATION_SCHEMA = {"type": "string", "pattern": rf"^\s*{_DURATION.pattern}\s*$"}
_COUNT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": MAX_ACTORS}
_ACTORS_SCHEMA = {"anyOf": [_COUNT_SCHEMA, {"type": "array", "items": _COUNT_SCHEMA, "minItems": 2, "maxItems": 2}]}
_COLUMNS_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "uniqueItems": True}]}

Switch = Annotated[bool, BeforeValidator(_switch), WithJsonSchema(_SWITCH_SCHEMA)]
AutoOrSwitch = Annotated[
    Literal["auto"] | bool,
    BeforeValidator(_auto_or_switch),
    WithJsonSchema({"anyOf": [{"const": "auto"}, *_SWITCH_SCHEMA["anyOf"]]}),
]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1), WithJsonSchema(_BYTES_SCHEMA)]
# In seconds, at most a year.
Duration = Annotated[float, BeforeValidator(_duration), Field(ge=0, le=31_536_000), WithJsonSchema(_DURATION_SCHEMA)]
# A local wall time in ISO form.
Moment = Annotated[str, BeforeValidator(_moment), WithJsonSchema({"type": "string", "pattern": _MOMENT_PATTERN})]
# A path or an fsspec url
PathOrUrl = Annotated[str, Field(min_length=1), AfterValidator(_on_one_line), AfterValidator(_no_login)]
AdapterPath = Annotated[PathOrUrl, AfterValidator(_embedded_adapter_exists)]  # likewise
ModelPath = Annotated[PathOrUrl, AfterValidator(_embedded_exists)]  # or a Hugging Face id, or an embedded model
# The number of engines, or the smallest and the largest.
Actors = Annotated[int | tuple[int, int], BeforeValidator(_actors), WithJsonSchema(_ACTORS_SCHEMA)]
Column = Annotated[str, Field(min_length=1)]
Columns = Annotated[
    tuple[Column, ...], BeforeValidator(_listed), AfterValidator(_distinct), WithJsonSchema(_COLUMNS_SCHEMA)
]
Text = Annotated[str, Field(min_length=1)]
ConditionText = Annotated[str, AfterValidator(_condition)]  # in the language of `Condition`
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed, json_schema_input_type=Text | list[Text]),
]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed)]
