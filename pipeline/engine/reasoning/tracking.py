"""Tracks one row's reasoning: where it begins and ends, its budget, and its share of the completion. No torch.

A row reasons from its first token on, or not at all: either its prompt ends within reasoning, as the chat templates of
some models do, or its first token is the start marker. The answer begins at the first end marker after that. All of it
depends only on the tokens, so it is the same after a preemption.

Some models write markers of several tokens, because their vocabulary has no own ones (`<think>` in a vocabulary without
it, or a sentence). Tokens do not show where such a marker is: its first and last characters may share a token with the
text around it. It is searched in the text once the row has ended (`TextReasoning`), and options that depend on it while
the row runs are not supported.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pipeline.engine.reasoning.markers import KEY, MarkerTokens, ReasoningMarkers

Decode = Callable[[Sequence[int]], str]
_BLANK_TOKENS = 8  # maximum tokens of a template's whitespace after a start marker


class Thinking(IntEnum):
    """Reasoning state of a row with a budget, or with a grammar, which constrains only the answer."""

    NO = 0
    MAY_BEGIN = 1  # with the first token, if that is the start marker
    YES = 2


@dataclass(frozen=True)
class RowReasoning:
    """Reasoning of one row. is_open: the prompt ends within reasoning. budget: maximum number of its tokens without
    markers; None: unlimited. has_grammar: whether the answer is constrained by one."""

    markers: MarkerTokens
    is_open: bool
    budget: int | None = None
    has_grammar: bool = False

    @classmethod
    def after(
        cls, prompt_ids: np.ndarray, markers: MarkerTokens, budget: int | None, has_grammar: bool
    ) -> "RowReasoning":
        """Build for a row with this prompt. It is open if the prompt's last marker is a start marker."""
        found = prompt_ids[(prompt_ids == markers.start_id) | (prompt_ids == markers.end_id)]
        is_open = bool(len(found)) and int(found[-1]) == markers.start_id
        return cls(markers, is_open, budget, has_grammar)

    def thinking(self, generated: np.ndarray) -> Thinking:
        """Return the row's state after these generated tokens."""
        if self.budget is None and not self.has_grammar:
            return Thinking.NO
        if not self.is_open and not len(generated):
            return Thinking.MAY_BEGIN
        has_begun = self.is_open or generated[0] == self.markers.start_id
        return Thinking.YES if has_begun and not (generated == self.markers.end_id).any() else Thinking.NO

    def thinking_deadline(self, num_prompt: int) -> int | None:
        """Return the number of known tokens at which the row's budget is used up; None without a budget."""
        return None if self.budget is None else num_prompt + (not self.is_open) + self.budget

    def closing_id(self, generated: np.ndarray) -> int:
        """Return the token that ends reasoning, or the next of several tokens that do, after these generated tokens."""
        return self.markers.end_id

    def split_tokens(self, token_ids: Sequence[int]) -> tuple[list[int] | None, list[int]]:
        """Return the tokens of the reasoning and of the answer, both without markers. Without an end marker everything
        is reasoning if that has begun, otherwise there is none (None). An end marker alone ends reasoning whose start
        was not recognised, as when a prompt opens it in other words, unless a grammar constrained the tokens."""
        ids = list(token_ids)
        begins = ids[:1] == [self.markers.start_id]
        has_begun = self.is_open or begins
        if self.markers.end_id in ids and (has_begun or not self.has_grammar):
            end = ids.index(self.markers.end_id)
            return ids[begins:end], ids[end + 1 :]
        return (ids[begins:], []) if has_begun else (None, ids)

    def split(self, token_ids: Sequence[int], text: str, decode: Decode) -> tuple[str | None, str, int]:
        """Split the text; see `TextReasoning.split`."""
        thought_ids, answer_ids = self.split_tokens(token_ids)
        if thought_ids is None:
            return None, text, 0
        # A stop string, or a last token that is not text, cuts the end of the text, in the reasoning or the answer.
        num_cut, answer, thought = len(decode(token_ids)) - len(text), decode(answer_ids), decode(thought_ids)
        num_after = len(answer)  # characters after the thought
        if self.markers.end_id in token_ids:
            num_after += len(decode([self.markers.end_id]))
        thought = without_end(thought, max(num_cut - num_after, 0))
        return thought, without_end(answer, num_cut), len(thought_ids)


def without_end(text: str, num_characters: int) -> str:
    return text[: max(len(text) - num_characters, 0)]


def text_unsupported_reason(found: ReasoningMarkers, has_budget: bool, has_grammar: bool) -> str | None:
    """Return which option of a row needs markers of one token each, as an error message; None if none does."""
    if not has_budget and not has_grammar:
        return None
    name = "thinking_token_budget" if has_budget else "structured_outputs"
    return (
        f"sampling.{name}: needs markers that are one token each, but the markers of {KEY}, {found.start!r} and "
        f"{found.end!r}, are several tokens in this vocabulary; remove one of the two options"
    )


@dataclass(frozen=True)
class TextReasoning:
    """Reasoning found in the text. is_open: the prompt ends with the start marker, ignoring whitespace after it."""

    markers: ReasoningMarkers
    is_open: bool

    @classmethod
    def after(cls, prompt_ids: np.ndarray, markers: ReasoningMarkers, decode: Decode) -> "TextReasoning":
        """Build for a row with this prompt. A marker in the middle of it may be data, so only its end counts."""
        last = prompt_ids[-(len(markers.start.encode()) + _BLANK_TOKENS) :].tolist()
        return cls(markers, decode(last).rstrip().endswith(markers.start.strip()))

    def split(self, token_ids: Sequence[int], text: str, decode: Decode) -> tuple[str | None, str, int]:
        """Return the reasoning of `text` and the answer, both without markers, and the number of reasoning tokens.
        text: the text of token_ids, or its beginning. The reasoning is None, with no tokens, if neither text nor prompt
        has a marker."""
        begin, start = len(text) - len(text.lstrip()), self.markers.start.strip()
        has_begun = text.startswith(start, begin)
        begin = begin + len(start) if has_begun else 0
        end = text.find(self.markers.end, begin)
        if end < 0 and not has_begun and not self.is_open:
            return None, text, 0
        answer = "" if end < 0 else text[end + len(self.markers.end) :]
        end = len(text) if end < 0 else end

        def length(num_tokens: int) -> int:
            return len(decode(token_ids[:num_tokens]))

        counts = range(len(token_ids) + 1)
        first, last = bisect_left(counts, begin, key=length), bisect_right(counts, end, key=length) - 1
        return text[begin:end], answer, max(last - first, 0)
