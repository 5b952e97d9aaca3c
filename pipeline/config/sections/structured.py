"""`sampling.structured_outputs` as a job file writes it: checked and compiled once, or each row's own from a column.

Owns the key's forms and the file of `json_file`, whose content takes its place when a job is loaded: so the job's
identity, and a job that is sent elsewhere, hold the schema itself.
"""

import json
import os
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeline.config.jobfile import Document, JobFileError, KeyPath, Mistake, Value
from pipeline.config.values import FromColumn
from pipeline.engine.grammar.structured_outputs import MAX_BYTES, StructuredOutputs
from pipeline.errors import ConfigError

PLACE = ("sampling", "structured_outputs")
_COLUMN_KINDS = ("json", "regex", "choice", "grammar")


class StructuredFromColumn(FromColumn):
    """What each row's completion must be, in a column: schemas as JSON text, regular expressions, lists of texts or
    Lark grammars. A null: that row is not held to anything."""

    kind: str


def _structured(value: Any) -> Any:
    """Raises ValueError where it cannot be compiled, with the compiler's words."""
    if value is None or isinstance(value, StructuredOutputs | StructuredFromColumn):
        return value
    if isinstance(value, dict):
        for kind in _COLUMN_KINDS:
            inner = value.get(kind)
            if isinstance(inner, dict) and set(inner) == {"column"} and isinstance(inner["column"], str):
                if len(value) > 1:
                    raise ValueError(f"{kind}: {{column: name}} stands alone; got {', '.join(value)}")
                return StructuredFromColumn(column=inner["column"], kind=kind)
    from pipeline.engine.grammar.compiler import check_grammar

    try:
        wanted = StructuredOutputs.of(value)
        check_grammar(wanted)
    except ConfigError as error:
        raise ValueError(error.problem(".".join(PLACE)).lstrip(".")) from None
    return wanted


def _written(value: StructuredOutputs | StructuredFromColumn | None) -> dict[str, Any] | None:
    if isinstance(value, StructuredFromColumn):
        return {value.kind: {"column": value.column}}
    return None if value is None else value.to_dict()


def with_schema_file(document: Document) -> Document:
    """`document` with the schema that `json_file` names in the place of that key. Raises JobFileError."""
    sampling = document.data.get("sampling")
    given = sampling.get("structured_outputs") if isinstance(sampling, dict) else None
    if not isinstance(sampling, dict) or not isinstance(given, dict) or given.get("json_file") is None:
        return document
    place = (*PLACE, "json_file")
    if given.get("json") is not None:
        raise _mistake(document, place, "json and json_file are both there", "Keep one of the two.")
    schema = _read_schema(document, place, given["json_file"])
    rest: dict[str, Value] = {key: value for key, value in given.items() if key != "json_file"}
    data: dict[str, Value] = dict(document.data)
    data["sampling"] = {**sampling, "structured_outputs": {**rest, "json": schema}}
    return Document(data, document.origins | {(*PLACE, "json"): document.where(place)})


def _read_schema(document: Document, place: KeyPath, path: object) -> Value:
    if not isinstance(path, str):
        raise _mistake(document, place, "expected the path of a file that holds a JSON Schema")
    try:
        with open(os.path.expanduser(path), "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise _mistake(document, place, f"{path}: larger than {MAX_BYTES} bytes: not a schema")
        return json.loads(raw.decode("utf-8"))
    except OSError as error:
        hint = "Relative paths are below the working directory."
        raise _mistake(document, place, f"{path}: cannot be read: {error.strerror}", hint) from None
    except (ValueError, RecursionError) as error:
        raise _mistake(document, place, f"{path}: not JSON: {error}") from None


def _mistake(document: Document, place: KeyPath, problem: str, hint: str = "") -> JobFileError:
    return JobFileError([Mistake(document.where(place), ".".join(map(str, place)), problem, hint)])


_COLUMN = FromColumn.model_json_schema()


def _or_column(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, _COLUMN]}


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_FORMS: dict[str, Any] = {
    "json": {"anyOf": [{"type": "object"}, _TEXT]},  # a schema, its text, or {column: name}
    "json_file": _TEXT,
    "json_object": {"const": True},
    "regex": _or_column(_TEXT),
    "choice": _or_column({"type": "array", "items": _TEXT, "minItems": 1}),
    "grammar": _or_column(_TEXT),
    "whitespace_pattern": _TEXT,
}
_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": _FORMS, "minProperties": 1, "maxProperties": 2, "additionalProperties": False},
        {"type": "null"},
    ]
}

StructuredOrColumn = Annotated[
    StructuredOutputs | StructuredFromColumn | None,
    PlainValidator(_structured),
    PlainSerializer(_written),
    WithJsonSchema(_SCHEMA),
]
