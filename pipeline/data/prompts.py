"""Rendering of a row's columns into a prompt, or into an error.

A template is split once into literals and fields (`prompt_template`). Values are inserted between the literals and
never parsed, so `{{ }}` or `{report}` in the data stays unchanged. The engine turns messages into text with the chat
template.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as of_dataclass
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.columns import did_you_mean, is_text
from pipeline.data.image_columns import EXPECTED, MAX_IMAGE_BYTES, holds_images, images_of
from pipeline.data.json_text import BadJson, parse_json
from pipeline.data.messages import MessageRefused, image_part, media_message, plain_message, refusal_of_type
from pipeline.data.prompt_template import Field, NoText, check_names_column, in_template, parse
from pipeline.errors import ConfigError, RowError

MAX_BYTES = 8 * 1024 * 1024
_NOT_UTF8 = b"\xff"  # replaces a nested value with text that is not UTF-8; decoding it fails
_OUT_OF_RANGE = b"<value out of range"  # Arrow's text for dates and times outside its range


@dataclass(frozen=True)
class PromptSpec:
    """Source of the prompts: exactly one of a text column, a template, and a column of chat messages.

    Raises ConfigError if there is not exactly one, or the template is malformed.
    """

    column: str | None = None
    template: str | None = None
    messages: str | None = None
    max_bytes: int = MAX_BYTES  # of the rendered prompt, in UTF-8
    defaults: Mapping[str, str] = of_dataclass(default_factory=dict)  # texts for nulls, by field name
    refused: str | None = None  # text column with the reason why a row is refused, or null
    in_pieces: bool = False  # render a template as a JSON list of literals and values, alternating
    images: tuple[str, ...] = ()  # columns of images; the prompts are then messages as JSON
    media: bool = False  # messages may have parts other than text, which a server reads
    is_turn: bool = False  # a further turn of a chat: the template may name no column
    dotted: tuple[str, ...] = ()  # input columns with dots in their names: {a.b} may be one, or a field of {a}

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.column, self.template, self.messages)) != 1:
            raise ConfigError("prompt: give exactly one of template, column, messages")
        if self.in_pieces and self.template is None:
            raise ConfigError("prompt.special_tokens: template requires prompt.template")
        if self.messages is not None and self.defaults:
            raise ConfigError("prompt.fill_null: only works with prompt.template or prompt.column, not with messages")
        if self.template is not None and not self.images and not self.is_turn:
            check_names_column(self.parts[1])
        names = [] if self.messages is not None else [field.name for field in self.parts[1]]
        for name in self.defaults:
            if name not in names:
                raise ConfigError(f"prompt.fill_null: {name!r} is not in the prompt{did_you_mean(name, names)}")

    def of_input(self, columns: Iterable[str]) -> "PromptSpec":
        """Return a copy for an input with these columns. Raises ConfigError if the template misses the backticks of a
        column's name."""
        names = tuple(columns)
        spec = replace(self, dotted=tuple(name for name in names if "." in name))
        for field in () if self.template is None else spec.parts[1]:
            intended = next((n for n in names if n.startswith(field.column) and in_template(n) != n), None)
            if field.column not in names and intended is not None:
                raise ConfigError(
                    f"prompt.template: the input has no column {field.column!r}; write the column {intended!r} as "
                    f"{{{in_template(intended)}}}"
                )
        return spec

    @property
    def parts(self) -> tuple[tuple[str, ...], tuple[Field, ...]]:
        """Literals and the fields between them, for a template or a text column."""
        if self.template is not None:
            return parse(self.template, self.dotted)
        return ("", ""), (Field(self.column or ""),)

    def text_of(self, prompt: str) -> str:
        """Return a rendered prompt as one text, or messages as their JSON."""
        return "".join(json.loads(prompt)) if self.in_pieces else prompt

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rendering reads, each once."""
        more = self.images if self.refused is None else (self.refused,)
        if self.template is not None:
            return tuple(dict.fromkeys([*(field.column for field in self.parts[1]), *more]))
        return tuple(dict.fromkeys([self.column or self.messages or "", *more]))

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if prompts cannot be rendered from the columns of `schema`."""
        for name in self.columns:
            if name not in schema.names:
                raise ConfigError(f"prompt: the input has no column {name!r}{did_you_mean(name, schema.names)}")
            if name in self.images:
                if not holds_images(kind := schema.field(name).type):
                    raise ConfigError(f"prompt.images: column {name!r} is {kind}, {EXPECTED}")
            elif not _has_text_form(schema.field(name).type):
                raise ConfigError(f"prompt: column {name!r} is {schema.field(name).type}, which has no text form")
        for field in () if self.template is None else self.parts[1]:
            if field.column not in self.images:
                field.check(schema)
            elif field.path or field.form:
                raise ConfigError(
                    f"prompt.template: {{{field.name}}}: a column of prompt.images has no fields or format"
                )
        if self.column is not None and not is_text(schema.field(self.column).type):
            raise ConfigError(
                f"prompt.column {self.column!r} is {schema.field(self.column).type}, expected text; "
                "for a list of role and content use prompt.messages"
            )
        if self.messages is not None:
            t = schema.field(self.messages).type
            problem = refusal_of_type(t, self.media)
            if problem is not None:
                raise ConfigError(f"prompt.messages {self.messages!r} is {t}: {problem}")


@dataclass(frozen=True)
class Rendered:
    """Rendered rows. Each list has one entry per row: a prompt with its images, or a RowError code and an error
    message."""

    prompts: list[str | None]
    errors: list[str | None]
    messages: list[str | None]
    images: list[list[bytes | str]]


class _Refused(Exception):
    """The row has no valid prompt."""

    def __init__(self, code: RowError, message: str) -> None:
        super().__init__(message)
        self.code = code


def template_columns(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, each once, in order. Raises ConfigError if it is malformed or names
    none."""
    fields = parse(template)[1]
    check_names_column(fields)
    return tuple(dict.fromkeys(field.column for field in fields))


def render(table: pa.Table, spec: PromptSpec, max_bytes: int | None = None) -> Rendered:
    """Render the rows of `table`. With `max_bytes`, stop before prompts and images exceed it, but after at least one
    row.

    A bad row becomes an error entry, never an exception.
    """
    make_rows = _text_rows if spec.messages is None else _messages_rows
    out, num_bytes = Rendered([], [], [], []), 0
    # batches keep most of the columns out of Python objects, which take more memory
    for batch in table.to_batches(max_chunksize=1024):
        refused = repeat(None) if spec.refused is None else batch.column(spec.refused).to_pylist()
        for make_prompt, problem in zip(make_rows(batch, spec), refused):
            try:
                if problem is not None:
                    raise _Refused(RowError.INVALID_REQUEST, problem)
                (prompt, images), code, message = make_prompt(), None, None
            except _Refused as e:
                (prompt, images), code, message = (None, []), str(e.code), str(e)
            if max_bytes is not None:
                num_bytes += len((prompt or "").encode()) + sum(map(len, images))
                if num_bytes > max_bytes and out.prompts:
                    return out
            out.prompts.append(prompt)
            out.errors.append(code)
            out.messages.append(message)
            out.images.append(images)
    return out


def _text_rows(table: pa.RecordBatch, spec: PromptSpec) -> Iterator[Any]:
    literals, fields = spec.parts
    literal_bytes = sum(len(text.encode()) for text in literals)
    columns = []
    for field in dict.fromkeys(field for field in fields if field.column not in spec.images):
        default = spec.defaults.get(field.name)
        values = field.values(table, lambda column: text_bytes(column, spec.max_bytes))
        columns.append((field, values if default is None else [default.encode() if v is None else v for v in values]))
    for i in range(table.num_rows):
        values = {field: column[i] for field, column in columns}
        images = {name: lambda name=name, i=i: table.column(name)[i].as_py() for name in spec.images}
        yield lambda values=values, images=images: _fill(literals, fields, values, images, literal_bytes, spec)


def _fill(
    literals: tuple[str, ...],
    fields: tuple[Field, ...],
    values: dict[Field, "bytes | TooLarge | NoText | None"],
    images: dict[str, Callable[[], Any]],
    literal_bytes: int,
    spec: PromptSpec,
) -> tuple[str, list[bytes | str]]:
    """Return the prompt and its images. images: return the value of each column of images."""
    decoded: dict[Field, str] = {}
    size = literal_bytes
    for field in fields:
        if field.column in images:
            continue
        value = values[field]
        if value is None:
            raise _Refused(RowError.NULL_PROMPT, f"column {field.name!r} is null")
        if isinstance(value, NoText):
            raise _Refused(RowError.INVALID_VALUE, f"column {field.name!r}: {value.reason}")
        size += len(value)
    _check_size(size, spec.max_bytes)
    for field, value in values.items():
        assert isinstance(value, bytes)  # TooLarge fails the size check
        decoded[field] = _decode(value, field.name)
    if (
        decoded
        and not any(text.strip() for text in decoded.values())
        and not _is_prompt_without_values(literals, fields, spec)
    ):
        named = ", ".join(repr(field.name) for field in decoded)
        raise _Refused(RowError.EMPTY_PROMPT, f"only whitespace in {named}")
    if spec.images:
        return _turn_with_images(literals, fields, decoded, images)
    out = [literals[0]]
    for field, literal in zip(fields, literals[1:], strict=True):
        out += (decoded[field], literal)
    return json.dumps(out, ensure_ascii=False) if spec.in_pieces else "".join(out), []


def _turn_with_images(
    literals: tuple[str, ...],
    fields: tuple[Field, ...],
    decoded: dict[Field, str],
    images: dict[str, Callable[[], Any]],
) -> tuple[str, list[bytes | str]]:
    """Return the user's turn as messages in JSON, and its images: those that the template does not name come first."""
    found = {name: _row_images(value(), name) for name, value in images.items()}
    named = {field.column for field in fields}
    before = [image for name, some in found.items() if name not in named for image in some]
    parts, all_images = [image_part(image) for image in before], before
    text = literals[0]
    for field, literal in zip(fields, literals[1:], strict=True):
        if field.column not in found:
            text += decoded[field] + literal
            continue
        parts += [{"type": "text", "text": text}] if text.strip() else []
        parts += [image_part(image) for image in found[field.column]]
        all_images, text = all_images + found[field.column], literal
    parts += [{"type": "text", "text": text}] if text.strip() else []
    return json.dumps([{"role": "user", "content": parts}], ensure_ascii=False, separators=(",", ":")), all_images


def _row_images(value: Any, name: str) -> list[bytes | str]:
    try:
        images = images_of(value, f"column {name!r}")
    except MessageRefused as problem:
        raise _Refused(RowError.INVALID_IMAGE, str(problem)) from None
    if not images:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} has no image")
    _check_images(images)
    return images


def _check_images(images: list[bytes | str]) -> None:
    size = sum(len(image) for image in images if isinstance(image, bytes))
    if size > MAX_IMAGE_BYTES:
        reason = f"{size} bytes of images, expected at most {MAX_IMAGE_BYTES} before they are scaled down"
        raise _Refused(RowError.PROMPT_TOO_LARGE, reason)


def _is_prompt_without_values(literals: tuple[str, ...], fields: tuple[Field, ...], spec: PromptSpec) -> bool:
    """Return whether the template is a prompt without any value: it has text, and every field has a default. Otherwise
    the model would make up the data of a row without any."""
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
    """Placeholder for a value that exceeds the max size of a prompt, so that it is never copied."""

    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


def text_bytes(column: pa.Array, max_bytes: int) -> list[bytes | TooLarge | NoText | None]:
    """Return a column's values as unchecked UTF-8 bytes: numbers and dates in Arrow's text form, lists, structs and
    maps as JSON, and NoText for values that neither Arrow nor Python can write.

    They are bytes because Arrow refuses a whole column for one invalid UTF-8 string.
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
    """Return one list, struct or map as Python values; `_NOT_UTF8` if a string in it is not UTF-8, NoText if Python
    cannot represent it: dates outside the years 1 to 9999, a struct with duplicate field names."""
    try:
        return _with_objects(column[i].as_py(), column.type)
    except UnicodeDecodeError:
        return _NOT_UTF8
    except (ValueError, OverflowError) as error:
        return NoText(f"a value in {column.type}: {error}")


def _with_objects(value: Any, t: pa.DataType) -> Any:
    """Return the value with each map as a dict with text keys. The last value of a repeated key counts, as in
    Parquet."""
    if value is None or not pa.types.is_nested(t):
        return value
    if pa.types.is_map(t):
        keys = (_key_text(_with_objects(key, t.key_type)) for key, _ in value)
        return {key: _with_objects(item, t.item_type) for key, (_, item) in zip(keys, value, strict=True)}
    if pa.types.is_struct(t):
        return {f.name: _with_objects(value[f.name], f.type) for f in t.fields}
    return [_with_objects(item, t.value_type) for item in value]


def _key_text(key: Any) -> str:
    """Return a key in JSON form, without quotes around a text."""
    text = json.dumps(key, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return json.loads(text) if text.startswith('"') else text


def _has_text_form(t: pa.DataType) -> bool:
    if pa.types.is_nested(t):
        return all(_has_text_form(t.field(i).type) for i in range(t.num_fields))
    if is_text(t) or isinstance(t, pa.UuidType):
        return True
    # Arrow looks up a time zone only if there is a value
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
    """Return text for a value without a JSON form. Bytes are decoded as UTF-8, like bytes columns."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _messages_rows(table: pa.RecordBatch, spec: PromptSpec) -> Iterator[Any]:
    name = spec.messages or ""
    column = table.column(name)
    if is_text(column.type):
        for value in _small_bytes(column.cast(pa.binary()), _max_json_bytes(spec)):
            yield lambda value=value: _messages_from_json(value, name, spec)
    else:
        for i in range(len(column)):
            yield lambda i=i: _messages(_nested(column, i), name, spec)


def _max_json_bytes(spec: PromptSpec) -> int:
    """Return the limit of a chat as JSON; with media, images in base64 are part of it."""
    return spec.max_bytes + (MAX_IMAGE_BYTES * 4 // 3 if spec.media else 0)


def _messages_from_json(value: bytes | TooLarge | None, name: str, spec: PromptSpec) -> tuple[str, list[bytes | str]]:
    if value is None:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} is null")
    _check_size(len(value), _max_json_bytes(spec))
    assert isinstance(value, bytes)
    text = _decode(value, name)
    if not text.strip():
        raise _Refused(RowError.EMPTY_PROMPT, f"only whitespace in {name!r}")
    try:
        parsed = parse_json(text)
    except BadJson as e:
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: {e}") from e
    if parsed is None:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} is null")
    return _messages(parsed, name, spec)


def _messages(value: object, name: str, spec: PromptSpec) -> tuple[str, list[bytes | str]]:
    """Return the canonical JSON of a chat, role and content first, null keys dropped, and its images."""
    if value is None:
        raise _Refused(RowError.NULL_PROMPT, f"column {name!r} is null")
    if isinstance(value, bytes):
        raise _Refused(RowError.INVALID_UTF8, f"column {name!r} holds bytes that are not UTF-8")
    if isinstance(value, NoText):
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: {value.reason}")
    if not isinstance(value, list):
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: expected a list of messages")
    images: list[bytes | str] = []
    begin = f"column {name!r}, message " if spec.refused is None else "body.messages["
    end = "" if spec.refused is None else "]"
    try:
        messages = [
            media_message(message, f"{begin}{i}{end}", images)
            if spec.media
            else plain_message(message, f"{begin}{i}{end}")
            for i, message in enumerate(value)
        ]
    except MessageRefused as e:
        code = RowError.INVALID_MESSAGES if spec.refused is None else RowError.INVALID_REQUEST
        raise _Refused(code, str(e)) from None
    _check_images(images)
    if not any(m["content"].strip() if isinstance(m["content"], str) else m["content"] for m in messages):
        raise _Refused(RowError.EMPTY_PROMPT, f"no message in {name!r} has any text")
    try:
        text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
        size = len(text.encode())
    except (ValueError, RecursionError) as e:  # a lone surrogate, NaN, infinity, or too deep nesting
        raise _Refused(RowError.INVALID_MESSAGES, f"column {name!r}: {e}") from e
    _check_size(size, spec.max_bytes)
    return text, images
