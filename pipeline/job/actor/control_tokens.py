"""Texts that the job file puts into prompts, and rows whose prompts contain texts of control tokens.

Text is never parsed as a control token, so the model sees its letters; users who render chats themselves may expect
otherwise.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.prompts import PromptSpec
from pipeline.data.units import Unit
from pipeline.report.record.data_warnings import ControlTokenRows

if TYPE_CHECKING:
    from pipeline.config.sections.prompt import PromptSection


@dataclass(frozen=True)
class AuthorTexts:
    """Texts of the job file: the literals of `prompt.template`, and the system message of `prompt.chat`.

    parses_control_tokens: control tokens in the literals are parsed; a unit's prompts are then pieces as JSON.
    """

    literals: tuple[str, ...] = ()
    system: str | None = None
    parses_control_tokens: bool = False


def author_texts(spec: PromptSpec, prompt: "PromptSection") -> AuthorTexts:
    """Return the texts that the job file itself puts into prompts. spec: of the section `prompt`."""
    literals = () if spec.template is None else spec.parts[0]
    return AuthorTexts(literals, prompt.chat and prompt.chat.system, spec.in_pieces)


class ControlTokenCounter:
    """Count rows of units with texts of control tokens. Thread-safe. Prompts are searched as Arrow arrays, which takes
    a fraction of the encoding time; only matches become Python strings."""

    def __init__(self, texts: Sequence[str], author: AuthorTexts) -> None:
        """texts: the texts of the tokenizer's control tokens."""
        self._pattern = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        self._find = re.compile(self._pattern).findall if texts else lambda text: []
        self._in_pieces = author.parses_control_tokens
        self._literal = [] if self._in_pieces else [text for part in author.literals for text in self._find(part)]
        self._of_author = [*self._literal, *self._find(author.system or "")]

    def __call__(self, unit: Unit) -> ControlTokenRows:
        prompts = unit.own("_prompt")
        if not self._pattern:
            return ControlTokenRows()
        in_template, example = 0, ""
        if self._of_author:
            in_template, example = len(prompts) - prompts.null_count, self._of_author[0]
        counts = pc.call_function("count_substring_regex", [prompts], pc.MatchSubstringOptions(self._pattern))
        more = pc.call_function("greater", [counts, pa.scalar(len(self._literal), counts.type)])
        rows = [i for i in pc.call_function("indices_nonzero", [more]).to_pylist() if self._own(prompts[i].as_py())]
        if not rows:
            return ControlTokenRows(in_template=in_template, template_example=example)
        (file, row), first = min(
            ((unit.own("source_file")[i].as_py(), unit.own("source_row")[i].as_py()), i) for i in rows
        )
        own = f"{file} row {row}: {self._own(prompts[first].as_py())}"
        return ControlTokenRows(in_template, len(rows), example, own)

    def first_in_row(self, prompt: str) -> str:
        """Return the first text of a control token in a row's own values; empty if there is none."""
        found = self._find(prompt)
        return self._own(prompt) if len(found) > len(self._literal) else ""

    def _own(self, prompt: str) -> str:
        """Return the first text of a control token in a row's own values, or ""."""
        if self._in_pieces:
            return next((text for value in json.loads(prompt)[1::2] for text in self._find(value)), "")
        found = self._find(prompt)
        return next((text for text in found if text not in self._literal), found[-1])
