"""Texts of a row besides its prompt: a completion to score, or labels to choose from.

A unit stores them in one text column: a completion as is, labels as a JSON list. A row with invalid texts becomes an
error row.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.data.columns import did_you_mean, is_list, is_text
from pipeline.data.prompt_template import in_template
from pipeline.data.prompts import PromptSpec, render
from pipeline.errors import ConfigError, RowError


@dataclass(frozen=True)
class RowTexts:
    """Source of the texts: exactly one of a completion and a column of label lists. key: the job file's key, for
    messages."""

    key: str
    completion: PromptSpec | None = None
    labels: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to read."""
        return self.completion.columns if self.completion is not None else (self.labels or "",)

    def of_input(self, columns: Iterable[str]) -> "RowTexts":
        """Return a copy for an input with these columns. Raises ConfigError as in `PromptSpec.of_input`."""
        try:
            return replace(self, completion=self.completion and self.completion.of_input(columns))
        except ConfigError as error:
            raise ConfigError(f"{self.key}: {error.problem('prompt.template')}") from None

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if the texts cannot be read from the columns of `schema`."""
        for name in self.columns:
            if name not in schema.names:
                raise ConfigError(f"{self.key}: the input has no column {name!r}{did_you_mean(name, schema.names)}")
        if self.completion is None:
            kind = schema.field(self.labels or "").type
            if not (is_list(kind) and is_text(kind.value_type)):
                raise ConfigError(f"{self.key}: column {self.labels!r} is {kind}, expected lists of texts")
        elif self.completion.column is not None and not is_text(kind := schema.field(self.completion.column).type):
            name = self.completion.column
            raise ConfigError(
                f'{self.key}: column {name!r} is {kind}, expected text; to convert it, write "{{{in_template(name)}}}"'
            )
        else:
            try:
                self.completion.check(schema)
            except ConfigError as error:
                raise ConfigError(f"{self.key}: {error.problem('prompt')}") from None

    def read(self, inputs: pa.Table, errors: list[str | None], messages: list[str | None]) -> list[str | None]:
        """Return each row's text, or None for error rows. Add an error to rows with invalid texts, in place."""
        if self.completion is not None:
            rendered = render(inputs, self.completion)
            texts, refused, code = rendered.prompts, rendered.messages, RowError.INVALID_COMPLETION
        else:
            lists = list(_lists(inputs.column(self.labels or "")))
            refused = [_label_problem(labels, self.labels) for labels in lists]
            texts = [
                None if problem else json.dumps(labels, ensure_ascii=False) for labels, problem in zip(lists, refused)
            ]
            code = RowError.INVALID_LABELS
        for i, problem in enumerate(refused):
            if problem is not None and errors[i] is None:
                errors[i], messages[i] = str(code), f"{self.key}: {problem}"
        return [text if error is None else None for text, error in zip(texts, errors, strict=True)]


def _lists(column: pa.ChunkedArray) -> Iterable[list[str | bytes | None] | None]:
    """Yield each row's labels; [b""] for a list with text that is not UTF-8."""
    for value in column:
        try:
            labels = value.as_py()
            yield labels and [label.decode() if isinstance(label, bytes) else label for label in labels]
        except UnicodeDecodeError:
            yield [b""]


def _label_problem(labels: list[str | bytes | None] | None, name: str | None) -> str | None:
    if labels is None:
        return f"column {name!r} is null"
    if not labels:
        return f"column {name!r} is an empty list"
    if None in labels:
        return f"a null among the labels of column {name!r}"
    if any(isinstance(label, bytes) for label in labels):
        return f"column {name!r} holds bytes that are not UTF-8 text"
    return f"an empty label in column {name!r}" if "" in labels else None
