"""Oddities in the data of a job that are no errors: counted, with one example each.

`pipeline validate`, the end of a run and report.json show the same short list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.formatting import counted

WarningKind = Literal["files_passed_over", "columns_unified", "control_tokens_in_template", "control_tokens_in_rows"]

MAX_FEW_ROWS = 3  # rows with control tokens in their texts are normal up to there: `<s>` is HTML too
_COUNTED: dict[WarningKind, tuple[str, str]] = {
    "files_passed_over": ("file", "of another format passed over"),
    "columns_unified": ("column", "stored in several types"),
    "control_tokens_in_template": ("row", "with control tokens that the job file writes as text"),
    "control_tokens_in_rows": ("row", "with texts of control tokens in the data"),
}
_ADVICE: dict[WarningKind, str] = {
    "files_passed_over": "where one holds rows, convert it to Parquet or JSON Lines",
    "columns_unified": "values are read as one type that holds them all; in prompts they have its form",
    "control_tokens_in_template": "the model reads them as letters; give the chat as prompt.messages, or the turn "
    "alone with prompt.chat, or set prompt.special_tokens: template",
    "control_tokens_in_rows": "text from data is never a control token; give chats as prompt.messages, or the text "
    "alone with prompt.chat",
}


@dataclass(frozen=True)
class DataWarning:
    """One kind of oddity: how many files, columns or rows, the first of them, and what to do."""

    kind: WarningKind
    count: int
    example: str
    advice: str

    def to_text(self) -> str:
        noun, what = _COUNTED[self.kind]
        return f"{counted(self.count, noun)} {what} ({self.example}): {self.advice}"


@dataclass(frozen=True)
class ControlTokenRows:
    """Rows whose prompts hold texts of the model's control tokens, and the first example of each kind.

    in_template: the job file writes them, as it does in every row; in_values: the row's own columns hold some.
    """

    in_template: int = 0
    in_values: int = 0
    template_example: str = ""
    value_example: str = ""

    def __add__(self, other: "ControlTokenRows") -> "ControlTokenRows":
        return ControlTokenRows(
            self.in_template + other.in_template,
            self.in_values + other.in_values,
            self.template_example or other.template_example,
            self.value_example or other.value_example,
        )

    def warnings(self) -> list[DataWarning]:
        found = []
        if self.in_template:
            found.append(data_warning("control_tokens_in_template", self.in_template, self.template_example))
        if self.in_values > MAX_FEW_ROWS:
            found.append(data_warning("control_tokens_in_rows", self.in_values, self.value_example))
        return found


def data_warning(kind: WarningKind, count: int, example: str) -> DataWarning:
    return DataWarning(kind, count, example, _ADVICE[kind])


def input_warnings(passed_over: Sequence[str], unified: Sequence[str]) -> list[DataWarning]:
    """Return what planning finds odd about the input. passed_over: names of files of other formats; unified: a text for
    each column that files store in several types."""
    found: dict[WarningKind, Sequence[str]] = {"files_passed_over": passed_over, "columns_unified": unified}
    return [data_warning(kind, len(each), each[0]) for kind, each in found.items() if each]
