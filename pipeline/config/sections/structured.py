"""Type of `sampling.structured_outputs`: one constraint for all rows, or a column with one per row.

The content of `json_file` replaces that key when a job is loaded, so that the job's identity, and a job sent to a
cluster, contain the schema itself.
"""

import json
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeline.config.jobfile import Document, JobFileError, KeyPath, Mistake, Value, dotted, of_each_prompt, read_named
from pipeline.config.values import FromColumn
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.errors import ConfigError

KEY_PATH = ("sampling", "structured_outputs")
_COLUMN_KINDS = ("json", "regex", "choice", "grammar")


class StructuredFromColumn(FromColumn):
    """Column with the constraint of each row: schemas as JSON text, regular expressions, lists of texts or Lark
    grammars. A row with null is unconstrained."""

    kind: str


def _structured(value: Any) -> Any:
    """Parse and compile the value. Raises ValueError with the compiler's message."""
    if value is None or isinstance(value, StructuredOutputs | StructuredFromColumn):
        return value
    if isinstance(value, dict):
        for kind in _COLUMN_KINDS:
            inner = value.get(kind)
            if isinstance(inner, dict) and set(inner) == {"column"} and isinstance(inner["column"], str):
                if len(value) > 1:
                    raise ValueError(
                        f"{kind}: {{column: name}} cannot be combined with other keys; got {', '.join(value)}"
                    )
                return StructuredFromColumn(column=inner["column"], kind=kind)
    from pipeline.engine.grammar.compiler import check_grammar

    try:
        outputs = StructuredOutputs.from_config(value)
        check_grammar(outputs)
    except ConfigError as error:
        raise ValueError(error.problem(".".join(KEY_PATH)).lstrip(".")) from None
    return outputs


def _written(value: StructuredOutputs | StructuredFromColumn | None) -> dict[str, Any] | None:
    if isinstance(value, StructuredFromColumn):
        return {value.kind: {"column": value.column}}
    return None if value is None else value.to_dict()


def with_schema_file(document: Document) -> Document:
    """Return `document` with `json_file` replaced by the schema in that file. Raises JobFileError."""
    for at, given in of_each_prompt(document, KEY_PATH):
        if not isinstance(given, dict) or given.get("json_file") is None:
            continue
        key_path = (*at, "json_file")
        if given.get("json") is not None:
            raise _mistake(document, key_path, "json and json_file are both set", "Keep one of the two.")
        schema = _read_schema(document, key_path, given["json_file"])
        rest: dict[str, Value] = {key: value for key, value in given.items() if key != "json_file"}
        document = document.replaced(at, {**rest, "json": schema})
        document = Document(document.data, document.origins | {(*at, "json"): document.location(key_path)})
    return document


def _read_schema(document: Document, key_path: KeyPath, path: object) -> Value:
    if not isinstance(path, str):
        raise _mistake(document, key_path, "expected the path of a file that holds a JSON Schema")
    text = read_named(document, key_path, path, hint="Relative paths start at the working directory.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _mistake(document, key_path, f"{path}: not JSON: {error}") from None


def _mistake(document: Document, key_path: KeyPath, problem: str, hint: str = "") -> JobFileError:
    return JobFileError([Mistake(document.location(key_path), dotted(key_path), problem, hint)])


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
