"""Prompt templates: text with `{column}`, `{column.field}`, `{column.key}` and `{column:.2f}`.

A name in backticks is literal; a backtick in it is doubled, as in Spark SQL. A template is split once into literals and
fields. The value of a field is read from its Arrow column and never parsed again, and a template cannot reach Python
attributes or indices.
"""

import datetime
import decimal
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.columns import did_you_mean, is_text
from pipeline.data.json_text import BadJson, parse_json
from pipeline.errors import ConfigError

_HINT = (
    "; write {column}, {column.field} or {column:.2f}, {`column`} for a name with other characters, and {{ or }} for a "
    "literal brace"
)
_MAX_HINT_CHARS = 64  # max length of a name shown in backticks
_NAME = r"`(?:[^`]|``)*`|[^`.{}:!\[][^.{}:!\[]*"  # a column or a field, in backticks or plain
_PLAIN_NAME = r"[^`{}:!\[\"'\n]+"  # needs no backticks
_PIECE = re.compile(
    rf"(?P<text>[^{{}}]+)|(?P<brace>\{{\{{|\}}\}})|\{{(?P<name>(?:{_NAME})(?:\.(?:{_NAME}))*)(?::(?P<form>[^{{}}]*))?\}}"
)
_NO_FIELD = re.compile(r"\{(?P<inside>(?:[^{}]|\{[^{}]*\})*)\}")
_MAX_WIDTH_DIGITS = 4  # of a format spec; a larger width could make a row of gigabytes


@dataclass(frozen=True)
class NoText:
    """Placeholder for a value without a text form, although its type has one. `reason` becomes the row's error."""

    reason: str


@dataclass(frozen=True, slots=True)
class Field:
    """Field of a template: a column, the path of nested fields, and an optional format spec."""

    column: str
    path: tuple[str, ...] = ()
    form: str = ""

    @property
    def name(self) -> str:
        """Dotted name, used in `prompt.fill_null` and messages."""
        return ".".join((self.column, *self.path))

    def type_in(self, schema: pa.Schema) -> pa.DataType | None:
        """Return the type of the field's values; None inside JSON text. Raises ConfigError if it does not exist."""
        kind = schema.field(self.column).type
        for at, name in enumerate(self.path):
            if is_text(kind) and at == 0:
                return None
            if pa.types.is_map(kind):
                self._key(kind, at)
                kind = kind.item_type
                continue
            if not pa.types.is_struct(kind):
                raise ConfigError(
                    f"prompt.template: {{{self.name}}}: {self._upto(at)!r} is {kind}, which "
                    "has no fields; expected a struct, a map, or text that holds JSON objects"
                )
            names = [field.name for field in kind.fields]
            if names.count(name) != 1:
                raise ConfigError(f"prompt.template: {{{self.name}}}: no field {name!r}{did_you_mean(name, names)}")
            kind = kind.field(name).type
        return kind

    def _upto(self, at: int) -> str:
        return ".".join((self.column, *self.path[:at]))

    def _key(self, kind: pa.DataType, at: int) -> pa.Scalar:
        """Return `path[at]` as a key of the map type `kind`. Raises ConfigError if it is not a valid key."""
        try:
            key = pa.scalar(self.path[at]).cast(kind.key_type)
            pc.call_function("map_lookup", [pa.nulls(1, kind)], pc.MapLookupOptions(key, "last"))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            raise ConfigError(
                f"prompt.template: {{{self.name}}}: {self._upto(at)!r} is {kind}, which cannot have the key "
                f"{self.path[at]!r}"
            ) from None
        return key

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if the schema lacks the field, or its format spec does not apply."""
        kind = self.type_in(schema)
        if not self.form:
            return
        sample = None if kind is None else _sample(kind)
        if sample is None:
            found = "a value inside JSON text" if kind is None else f"a value of type {kind}"
            raise ConfigError(
                f"prompt.template: {{{self.name}:{self.form}}}: {found} takes no format spec; only numbers, texts, "
                "dates and times do"
            )
        try:
            format(sample, self.form)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"prompt.template: {{{self.name}:{self.form}}}: {error} (it is {kind})") from None

    def values(self, batch: pa.RecordBatch, text_of: Callable[[pa.Array], list[Any]]) -> list[Any]:
        """Return each row's value as UTF-8 bytes, None, or NoText. `text_of` converts values without a format spec."""
        column = batch.column(self.column)
        if self.path and is_text(column.type):
            return [self._inside(value) for value in text_of(column)]
        for at, name in enumerate(self.path):
            if pa.types.is_map(column.type):  # the last value of a repeated key counts, as in Parquet
                column = pc.call_function(
                    "map_lookup", [column], pc.MapLookupOptions(self._key(column.type, at), "last")
                )
            else:
                column = pc.call_function("struct_field", [column], pc.StructFieldOptions([name]))
        if not self.form:
            return text_of(column)
        if is_text(column.type):
            return [_formatted_text(value, self.form) for value in text_of(column)]
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # Python has no nanoseconds
            column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
        return [_formatted(column[i], self.form) for i in range(len(column))]

    def _inside(self, value: Any) -> Any:
        """Return the field of a JSON object in a text; None if it is null or missing, or the text is blank. Return
        other values and invalid UTF-8 unchanged; they become the row's error later."""
        if not isinstance(value, bytes):
            return value
        if not value.strip():
            return None
        try:
            found = parse_json(value.decode())
        except UnicodeDecodeError:
            return value
        except BadJson as error:
            return NoText(f"the text of {self.column!r}: {error}")
        for at, name in enumerate(self.path):
            if not isinstance(found, dict | None):
                return NoText(f"{self._upto(at)!r} is {json.dumps(found):.40}, expected a JSON object")
            found = found.get(name) if found is not None else None
        if found is None:
            return None
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass")  # a lone surrogate becomes the row's error later


@lru_cache(maxsize=64)
def parse(template: str, dotted: tuple[str, ...] = ()) -> tuple[tuple[str, ...], tuple[Field, ...]]:
    """Split a template into literals and the fields between them.

    dotted: columns with dots in their names; a field refers to the longest of them that its name begins with. Raises
    ConfigError if the template is malformed.
    """
    try:
        template.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise ConfigError(f"prompt.template: {error}") from error
    literals, fields, at = [""], [], 0
    while at < len(template):
        piece = _PIECE.match(template, at)
        if piece is None:
            raise ConfigError(f"prompt.template: {_syntax_problem(template[at:])}{_HINT}")
        if piece["name"] is None:
            literals[-1] += piece["text"] or piece["brace"][0]
        else:
            fields.append(_field(piece["name"], piece["form"] or "", dotted))
            literals.append("")
        at = piece.end()
    return tuple(literals), tuple(fields)


def check_names_column(fields: tuple[Field, ...]) -> None:
    """Raise ConfigError if a template has no fields."""
    if not fields:
        raise ConfigError(f"prompt.template: names no column, so every prompt would be the same{_HINT}")


def in_template(name: str) -> str:
    """Return the column name as it is written between a template's braces, in backticks if needed."""
    is_plain = re.fullmatch(_PLAIN_NAME, name) and all(name.split(".")) and not name.isdigit()
    return name if is_plain else "`" + name.replace("`", "``") + "`"


def _syntax_problem(rest: str) -> str:
    """Return why `rest` does not begin with literal text or a field."""
    if rest[0] == "}":
        return f"a single }} before {rest[1:21]!r}"
    found = _NO_FIELD.match(rest)
    if found is None:
        return f"no }} closes {rest[:20]!r}"
    inside = found["inside"]
    is_name = 0 < len(inside) <= _MAX_HINT_CHARS and not any(c in inside for c in "\"'\n`")  # no JSON, no code
    if not is_name or not any(c in inside for c in "[{!"):
        return f"{found[0][:_MAX_HINT_CHARS]} names no column"
    advice = f"write a column of this name as {{{in_template(inside)}}}"
    return f"{found[0]}: indices, conversions and nested format specs are not supported; {advice}"


def _field(name: str, form: str, dotted: tuple[str, ...]) -> Field:
    parts = re.findall(_NAME, name)
    plain = ".".join(takewhile(lambda part: part[0] != "`", parts))
    column = max((c for c in dotted if f"{plain}.".startswith(f"{c}.")), key=len, default=parts[0])
    names = [column, *re.findall(_NAME, name[len(column) + 1 :])]
    if column.isdigit():
        raise ConfigError(
            f"prompt.template: {{{name}}} names no column; write a column of this name as {{`{column}`}}{_HINT}"
        )
    if form and any(c in part for part in parts if part[0] != "`" for c in "\"'\n"):  # braces of JSON
        raise ConfigError(f"prompt.template: {{{name}}} names no column{_HINT}")
    if any(len(digits) > _MAX_WIDTH_DIGITS for digits in re.findall(r"\d+", form)):
        raise ConfigError(
            f"prompt.template: {{{name}:{form}}}: a number in a format spec has at most {_MAX_WIDTH_DIGITS} digits"
        )
    column, *path = (part[1:-1].replace("``", "`") if part[0] == "`" else part for part in names)
    return Field(column, tuple(path), form)


def _sample(kind: pa.DataType) -> object:
    """Return a sample value of a type that can be formatted; None for other types."""
    if is_text(kind):
        return "x"
    if pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind):
        return 1
    if pa.types.is_floating(kind):
        return 1.5
    if pa.types.is_decimal(kind):
        return decimal.Decimal("1.5")
    if pa.types.is_date(kind):
        return datetime.date(2026, 1, 31)
    if pa.types.is_timestamp(kind):
        return datetime.datetime(2026, 1, 31)
    if pa.types.is_time(kind):
        return datetime.time(14, 5)
    return None


def _formatted(value: pa.Scalar, form: str) -> bytes | NoText | None:
    """Format a value. Return NoText if Python cannot, as for dates outside the years 1 to 9999 and invalid code
    points."""
    if not value.is_valid:
        return None
    try:
        return format(value.as_py(), form).encode()
    except (ValueError, OverflowError) as error:
        return NoText(f"{value.type} {value.cast(pa.string()).as_py()} cannot be formatted as {form!r}: {error}")


def _formatted_text(value: Any, form: str) -> Any:
    """Format a text. Return other values and invalid UTF-8 unchanged; they become the row's error later."""
    if not isinstance(value, bytes):
        return value
    try:
        return format(value.decode(), form).encode()
    except UnicodeDecodeError:
        return value
