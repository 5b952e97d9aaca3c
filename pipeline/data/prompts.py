"""From the columns of a row to the prompt that is asked, or to the reason why there is none.

Values are values: a template is split once into literal text and fields (`prompt_template`), and a value is put between
literals and never looked at again, so `{{ }}` or `{report}` in the data stays what it is. Turning messages
into text is the chat template's work, in the engine.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as of_dataclass
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.columns import did_you_mean, is_text
from pipeline.data.messages import MessageRefused, plain_message, refusal_of_type
from pipeline.data.prompt_template import Field, NoText, in_template, parse
from pipeline.errors import ConfigError, RowError

MAX_BYTES = 8 * 1024 * 1024
_NOT_UTF8 = b"\xff"  # stands for a value with text that is not: no decoder takes it
_OUT_OF_RANGE = b"<value out of range"  # what Arrow writes for dates and times that it has no text of


@dataclass(frozen=True)
class PromptSpec:
    """Where a row's prompt comes from: exactly one of a column of text, a template, a column of chat
    messages.

    Raises ConfigError when there is not exactly one, or the template is malformed.
    """

    column: str | None = None
    template: str | None = None
    messages: str | None = None
    max_bytes: int = MAX_BYTES  # of the rendered prompt, in UTF-8
    defaults: Mapping[str, str] = of_dataclass(default_factory=dict)  # texts for nulls, by what the template names
    refused: str | None = None  # a column of text that says why a row is not asked; null where it is
    in_pieces: bool = False  # a template is rendered as a JSON list of its literals and, between them, the values
    dotted: tuple[str, ...] = ()  # columns of the input whose names hold dots: {a.b} may be one, or a field of {a}

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.column, self.template, self.messages)) != 1:
            raise ConfigError("prompt: give exactly one of template, column, messages")
        if self.in_pieces and self.template is None:
            raise ConfigError("prompt.special_tokens: template is of prompt.template alone")
        if self.messages is not None and self.defaults:
            raise ConfigError("prompt.fill_null: only template and column take texts for nulls, messages does not")
        names = [] if self.messages is not None else [field.name for field in self.parts[1]]
        for name in self.defaults:
            if name not in names:
                raise ConfigError(f"prompt.fill_null: {name!r} is not in the prompt{did_you_mean(name, names)}")

    def of_input(self, columns: Iterable[str]) -> "PromptSpec":
        """The same of an input with these columns. Raises ConfigError where the template names one of them in a form
        that its name cannot have."""
        names = tuple(columns)
        spec = replace(self, dotted=tuple(name for name in names if "." in name))
        for field in () if self.template is None else spec.parts[1]:
            meant = next((n for n in names if n.startswith(field.column) and in_template(n) != n), None)
            if field.column not in names and meant is not None:
                raise ConfigError(
                    f"prompt.template: the input has no column {field.column!r}; the column {meant!r} is written "
                    f"{{{in_template(meant)}}}"
                )
        return spec

    @property
    def parts(self) -> tuple[tuple[str, ...], tuple[Field, ...]]:
        """The literals, and the fields between them, of a prompt that is text."""
        if self.template is not None:
            return parse(self.template, self.dotted)
        return ("", ""), (Field(self.column or ""),)

    def text_of(self, prompt: str) -> str:
        """Return a rendered prompt as one text, or messages as their JSON."""
        return "".join(json.loads(prompt)) if self.in_pieces else prompt

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that rendering reads, each once."""
        refused = () if self.refused is None else (self.refused,)
        if self.template is not None:
            return (*dict.fromkeys(field.column for field in self.parts[1]), *refused)
        return (self.column or self.messages or "", *refused)

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError when the columns of `schema` cannot be read as this asks."""
        for name in self.columns:
            if name not in schema.names:
                raise ConfigError(f"prompt: the input has no column {name!r}{did_you_mean(name, schema.names)}")
            if not _has_text_form(schema.field(name).type):
                raise ConfigError(f"prompt: column {name!r} is {schema.field(name).type}, which has no text form")
        for place in () if self.template is None else self.parts[1]:
            place.check(schema)
        if self.column is not None and not is_text(schema.field(self.column).type):
            raise ConfigError(
                f"prompt.column {self.column!r} is {schema.field(self.column).type}, expected text; "
                "for a list of role and content use prompt.messages"
            )
        if self.messages is not None:
            t = schema.field(self.messages).type
            why = refusal_of_type(t)
            if why is not None:
                raise ConfigError(f"prompt.messages {self.messages!r} is {t}: {why}")


@dataclass(frozen=True)
class Rendered:
    """One entry per row in each list: a prompt, or a RowError code in `errors` and a sentence in
    `messages`."""

    prompts: list[str | None]
    errors: list[str | None]
    messages: list[str | None]


class _Refused(Exception):
    """Why one row has no prompt."""

    def __init__(self, code: RowError, message: str) -> None:
        super().__init__(message)
        self.code = code


def template_columns(template: str) -> tuple[str, ...]:
    """The columns a template names, each once, in order. Raises ConfigError when it is malformed or names
    none."""
    return tuple(dict.fromkeys(field.column for field in parse(template)[1]))


def render(table: pa.Table, spec: PromptSpec, max_bytes: int | None = None) -> Rendered:
    """Render every row of `table`, or its first rows, of at most `max_bytes` of prompts or of one row. A bad row is an
    error of its own and never an exception."""
    make_rows = _text_rows if spec.messages is None else _messages_rows
    out, num_bytes = Rendered([], [], []), 0
    # some rows at a time, so that the columns never lie in memory as Python objects whole
    for batch in table.to_batches(max_chunksize=1024):
        refused = repeat(None) if spec.refused is None else batch.column(spec.refused).to_pylist()
        for make, why in zip(make_rows(batch, spec), refused):
            try:
                if why is not None:
                    raise _Refused(RowError.INVALID_REQUEST, why)
                prompt, code, message = make(), None, None
            except _Refused as e:
                prompt, code, message = None, str(e.code), str(e)
            if max_bytes is not None:
                num_bytes += len((prompt or "").encode())
                if num_bytes > max_bytes and out.prompts:
                    return out
            out.prompts.append(prompt)
            out.errors.append(code)
            out.messages.append(message)
    return out


def _text_rows(table: pa.RecordBatch, spec: PromptSpec) -> Iterator[Any]:
    literals, fields = spec.parts
    literal_bytes = sum(len(text.encode()) for text in literals)
    columns = []
    for field in dict.fromkeys(fields):
        default = spec.defaults.get(field.name)
        values = field.values(table, lambda column: text_bytes(column, spec.max_bytes))
        columns.append((field, values if default is None else [default.encode() if v is None else v for v in values]))
    for i in range(table.num_rows):
        values = {field: column[i] for field, column in columns}
        yield lambda values=values: _fill(literals, fields, values, literal_bytes, spec)


def _fill(
    literals: tuple[str, ...],
    fields: tuple[Field, ...],
    values: dict[Field, "bytes | TooLarge | NoText | None"],
    literal_bytes: int,
    spec: PromptSpec,
) -> str:
    decoded: dict[Field, str] = {}
    size = literal_bytes
    for field in fields:
        value = values[field]
        if value is None:
            raise _Refused(RowError.NULL_PROMPT, f"column {field.name!r} is null")
        if isinstance(value, NoText):
            raise _Refused(RowError.INVALID_VALUE, f"column {field.name!r}: {value.why}")
        size += len(value)
    _check_size(size, spec.max_bytes)
    for field, value in values.items():
        assert isinstance(value, bytes)  # else the size was too large
        decoded[field] = _decode(value, field.name)
    if not any(text.strip() for text in decoded.values()) and not _stands_alone(literals, fields, spec):
        named = ", ".join(repr(field.name) for field in decoded)
        raise _Refused(RowError.EMPTY_PROMPT, f"nothing but whitespace in {named}")
    out = [literals[0]]
    for field, literal in zip(fields, literals[1:], strict=True):
        out += (decoded[field], literal)
    return json.dumps(out, ensure_ascii=False) if spec.in_pieces else "".join(out)


def _stands_alone(literals: tuple[str, ...], fields: tuple[Field, ...], spec: PromptSpec) -> bool:
    """Return whether the template is a prompt without any value: it has text, and a default says of each column that
    the prompt can do without it. The model would make up the data of any other row that has none."""
    return all(field.name in spec.defaults for field in fields) and any(text.strip() for text in literals)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise _Refused(RowError.PROMPT_TOO_LARGE, f"{size} bytes, expected at most {max_bytes}")


def _decode(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _Refused(RowError.INVALID_UTF8, f"column {name!r}: byte {e.start} is not UTF-8") from e


@dataclass(frozen=True)
class TooLarge:
    """Stands for a value that alone is larger than a prompt may be, so that it is never copied."""

    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


def text_bytes(column: pa.Array, max_bytes: int) -> list[bytes | TooLarge | NoText | None]:
    """A column's values as UTF-8 bytes, not checked; numbers and dates as Arrow writes them, lists, structs and maps
    as JSON; NoText for those that neither Arrow nor Python can write.

    Bytes, because one string that is not UTF-8 would make Arrow refuse the whole column.
    """
    t = column.type
    if is_text(t):
        return list(_small_bytes(column.cast(pa.binary()), max_bytes))
    if pa.types.is_nested(t):
        values = (_nested(column, i) for i in range(len(column)))
        return [v if v is None or isinstance(v, bytes | NoText) else _json(v) for v in values]
    if isinstance(t, pa.UuidType):
        return [None if value is None else str(value).encode() for value in column.to_pylist()]
    texts = column.cast(pa.string()).cast(pa.binary()).to_pylist()
    if not pa.types.is_temporal(t):
        return texts
    return [NoText(f"{v.decode()} of {t}") if v is not None and v.startswith(_OUT_OF_RANGE) else v for v in texts]


def _small_bytes(column: pa.Array, max_bytes: int) -> list[bytes | TooLarge | None]:
    sizes = pc.call_function("binary_length", [column])
    large = pc.call_function("indices_nonzero", [pc.call_function("greater", [sizes, pa.scalar(max_bytes)])])
    if len(large) == 0:
        return column.to_pylist()
    stand_ins = {i: TooLarge(sizes[i].as_py()) for i in large.to_pylist()}
    return [stand_ins[i] if i in stand_ins else column[i].as_py() for i in range(len(column))]


def _nested(column: pa.Array, i: int) -> object:
    """One list, struct or map as Python values; `_NOT_UTF8` when a string in it is not, NoText where Python has no such
    value: dates outside of the years 1 to 9999, a struct with two fields of one name."""
    try:
        return _with_objects(column[i].as_py(), column.type)
    except UnicodeDecodeError:
        return _NOT_UTF8
    except (ValueError, OverflowError) as error:
        return NoText(f"a value in {column.type}: {error}")


def _with_objects(value: Any, t: pa.DataType) -> Any:
    """The value with a dict for each map, whose keys are texts. Of a key that comes twice the last is its value, as
    Parquet has it."""
    if value is None or not pa.types.is_nested(t):
        return value
    if pa.types.is_map(t):
        keys = (_key_text(_with_objects(key, t.key_type)) for key, _ in value)
        return {key: _with_objects(item, t.item_type) for key, (_, item) in zip(keys, value, strict=True)}
    if pa.types.is_struct(t):
        return {f.name: _with_objects(value[f.name], f.type) for f in t.fields}
    return [_with_objects(item, t.value_type) for item in value]


def _key_text(key: Any) -> str:
    """As in JSON, without the quotes of a text."""
    text = json.dumps(key, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return json.loads(text) if text.startswith('"') else text


def _has_text_form(t: pa.DataType) -> bool:
    if pa.types.is_nested(t):
        return all(_has_text_form(t.field(i).type) for i in range(t.num_fields))
    if is_text(t) or isinstance(t, pa.UuidType):
        return True
    # Arrow looks a time zone up only where there is a value
    sample = pa.scalar(0, t) if pa.types.is_timestamp(t) else pa.scalar(None, t)
    try:
        return sample.cast(pa.string()) is not None
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False


def _json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()
    except UnicodeDecodeError:
        return _NOT_UTF8


def _plain(value: object) -> str:
    """What JSON has no form for, as text. Bytes are text, as those of a column are."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _messages_rows(table: pa.RecordBatch, spec: PromptSpec) -> Iterator[Any]:
    name = spec.messages or ""
    column = table.column(name)
    if is_text(column.type):
        for value in _small_bytes(column.cast(pa.binary()), spec.max_bytes):
            yield lambda value=value: _messages_from_json(value, name, spec.max_bytes)
    else:
        for i in range(len(column)):
            yield lambda i=i: _messages(_nested(column, i), name, spec.max_bytes)


def _messages_from_json(value: bytes | TooLarge | None, name: str, max_bytes: int) -> str:
    if value is None:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} is null")
    _check_size(len(value), max_bytes)
    assert isinstance(value, bytes)
    text = _decode(value, name)
    if not text.strip():
        raise _Refused(RowError.EMPTY_PROMPT, f"nothing but whitespace in {name!r}")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r} is not JSON: {e}") from e
    if parsed is None:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} is null")
    return _messages(parsed, name, max_bytes)


def _messages(value: object, name: str, max_bytes: int) -> str:
    """The canonical JSON of a chat: role and content first, keys that are null left out."""
    if value is None:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} is null")
    if isinstance(value, bytes):
        raise _Refused(RowError.INVALID_UTF8, f"column {name!r} holds bytes that are not UTF-8")
    if isinstance(value, NoText):
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: {value.why}")
    if not isinstance(value, list):
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: expected a list of messages")
    try:
        messages = [plain_message(message, f"column {name!r}, message {i}") for i, message in enumerate(value)]
    except MessageRefused as e:
        raise _Refused(RowError.INVALID_MESSAGES, str(e)) from None
    if not any(m["content"] and m["content"].strip() for m in messages):
        raise _Refused(RowError.EMPTY_PROMPT, f"no message in {name!r} has any text")
    try:
        text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
        size = len(text.encode())
    except (ValueError, RecursionError) as e:  # half a surrogate pair, NaN or infinity, depth
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: {e}") from e
    _check_size(size, max_bytes)
    return text
