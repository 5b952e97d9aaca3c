"""Warnings about a job's data, counted by kind with one example each.

`pipeline validate`, the end of a run and report.json show the same list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.formatting import counted

WarningKind = Literal[
    "files_passed_over",
    "columns_unified",
    "large_compressed_lines",
    "no_rows",
    "control_tokens_in_template",
    "control_tokens_in_rows",
]

MAX_FEW_ROWS = 3  # up to this many rows with texts of control tokens are not reported: `<s>` is HTML too
_COUNTED: dict[WarningKind, tuple[str, str]] = {
    "files_passed_over": ("file", "of another format skipped"),
    "columns_unified": ("column", "stored in several types"),
    "large_compressed_lines": ("large compressed file", "of text"),
    "no_rows": ("file", "without a row"),
    "control_tokens_in_template": ("row", "with control tokens that the job file writes as text"),
    "control_tokens_in_rows": ("row", "with texts of control tokens in the data"),
}
_ADVICE: dict[WarningKind, str] = {
    "files_passed_over": "convert files that hold rows to one supported format",
    "columns_unified": "values are converted to one type that holds them all, which also determines their form in "
    "prompts",
    "large_compressed_lines": "each window decompresses its file from the beginning; use the decompressed file, "
    """python -c "import pyarrow as a, shutil, os; f = 'FILE'; """
    """shutil.copyfileobj(a.input_stream(f), open(os.path.splitext(f)[0], 'wb'))\"""",
    "no_rows": "nothing is computed; check input.path",
    "control_tokens_in_template": "the model reads them as plain text; use prompt.messages for chats, prompt.chat for "
    "a single turn, or set prompt.special_tokens: template",
    "control_tokens_in_rows": "text from data is never a control token; use prompt.messages for chats, or prompt.chat "
    "for a single turn",
}


@dataclass(frozen=True)
class DataWarning:
    """Warning of one kind: the number of files, columns or rows, the first of them, and advice."""

    kind: WarningKind
    count: int
    example: str
    advice: str

    def to_text(self) -> str:
        noun, description = _COUNTED[self.kind]
        return f"{counted(self.count, noun)} {description} ({self.example}): {self.advice}"


@dataclass(frozen=True)
class ControlTokenRows:
    """Numbers of rows whose prompts contain texts of the model's control tokens, with the first example of each kind.

    in_template: texts from the job file, as in every row. in_values: texts from the row's columns.
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


def input_warnings(
    passed_over: Sequence[str], unified: Sequence[str], large_compressed: Sequence[str], empty: Sequence[str]
) -> list[DataWarning]:
    """Return the warnings about the input found at planning. passed_over: files of other formats. unified: descriptions
    of columns that files store in several types. large_compressed: files that each window decompresses again. empty:
    all files, if none has rows."""
    found: dict[WarningKind, Sequence[str]] = {
        "files_passed_over": passed_over,
        "columns_unified": unified,
        "large_compressed_lines": large_compressed,
        "no_rows": empty,
    }
    return [data_warning(kind, len(each), each[0]) for kind, each in found.items() if each]
