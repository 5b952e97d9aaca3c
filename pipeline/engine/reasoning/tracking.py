"""Where one row's reasoning begins and ends, how long it may be, and its share of the completion. No torch.

A row reasons from its first token on, or not at all: its prompt ends within reasoning, as chat templates of some models
write it, or its first token is the start marker. The first end marker after that is where the answer begins. All of it
follows from the tokens alone, so it is the same after a preemption.

Some models write markers of several tokens, as their vocabulary has none of their own (`<think>` in a vocabulary
without it, or a sentence). Tokens do not show where such a marker is: its first and last characters may be one token
with what stands around it. It is looked for in the text, once the row has ended (`TextReasoning`), and nothing that
depends on it while the row runs is served.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Literal

import numpy as np

from pipeline.engine.reasoning.markers import KEY, MarkerTokens, ReasoningMarkers, Vocabulary, marker_tokens

Decode = Callable[[Sequence[int]], str]
_BLANK_TOKENS = 8  # a template's blanks after a start marker, at the most


class Thinking(IntEnum):
    """Of a row whose next tokens depend on it: those with a budget, or with a grammar, which holds the answer alone."""

    NO = 0
    MAY_BEGIN = 1  # with the first token, if that is the start marker
    YES = 2


@dataclass(frozen=True)
class RowReasoning:
    """is_open: the prompt ends within reasoning. budget: the most tokens of it, markers not counted; None: any number.
    has_grammar: whether the answer is held to one."""

    markers: MarkerTokens
    is_open: bool
    budget: int | None = None
    has_grammar: bool = False

    @classmethod
    def after(
        cls, prompt_ids: np.ndarray, markers: MarkerTokens, budget: int | None, has_grammar: bool
    ) -> "RowReasoning":
        """Of a row with this prompt: open where its last marker is a start."""
        found = prompt_ids[(prompt_ids == markers.start_id) | (prompt_ids == markers.end_id)]
        is_open = bool(len(found)) and int(found[-1]) == markers.start_id
        return cls(markers, is_open, budget, has_grammar)

    def thinking(self, generated: np.ndarray) -> Thinking:
        """Where the row is after these generated tokens."""
        if self.budget is None and not self.has_grammar:
            return Thinking.NO
        if not self.is_open and not len(generated):
            return Thinking.MAY_BEGIN
        has_begun = self.is_open or generated[0] == self.markers.start_id
        return Thinking.YES if has_begun and not (generated == self.markers.end_id).any() else Thinking.NO

    def latest_end(self, num_prompt: int) -> int | None:
        """With how many known tokens the row's budget is spent, if it still thinks then; None: never."""
        return None if self.budget is None else num_prompt + (not self.is_open) + self.budget

    def split_tokens(self, token_ids: Sequence[int]) -> tuple[list[int] | None, list[int]]:
        """The tokens of the reasoning and those of the answer, both without markers. Without an end marker all is
        reasoning if that has begun, and else (None) there is none. An end marker alone ends one that began in a way
        that is not seen here, as with a prompt that opens it in other words, if no grammar held its tokens."""
        ids = list(token_ids)
        begins = ids[:1] == [self.markers.start_id]
        has_begun = self.is_open or begins
        if self.markers.end_id in ids and (has_begun or not self.has_grammar):
            end = ids.index(self.markers.end_id)
            return ids[begins:end], ids[end + 1 :]
        return (ids[begins:], []) if has_begun else (None, ids)

    def split(self, token_ids: Sequence[int], text: str, decode: Decode) -> tuple[str | None, str, int]:
        """As `TextReasoning.split`."""
        thought_ids, answer_ids = self.split_tokens(token_ids)
        if thought_ids is None:
            return None, text, 0
        # A stop string or a last token that is no text cuts the end of the text, wherever the row is.
        num_cut, answer, thought = len(decode(token_ids)) - len(text), decode(answer_ids), decode(thought_ids)
        num_after = len(answer)  # characters after the thought
        if self.markers.end_id in token_ids:
            num_after += len(decode([self.markers.end_id]))
        thought = _without_end(thought, max(num_cut - num_after, 0))
        return thought, _without_end(answer, num_cut), len(thought_ids)


def _without_end(text: str, num_characters: int) -> str:
    return text[: max(len(text) - num_characters, 0)]


def why_not_by_text(found: ReasoningMarkers, has_budget: bool, has_grammar: bool) -> str | None:
    """What of a row's options needs markers of one token each; None: nothing."""
    if not has_budget and not has_grammar:
        return None
    name = "thinking_token_budget" if has_budget else "structured_outputs"
    return (
        f"sampling.{name}: needs markers that are one token each; those of {KEY}, {found.start!r} and {found.end!r}, "
        "are several here, and are found once a row has ended; leave one of the two options out"
    )


@dataclass(frozen=True)
class TextReasoning:
    """is_open: the prompt ends with the start marker, blanks after it not counted."""

    markers: ReasoningMarkers
    is_open: bool

    @classmethod
    def after(cls, prompt_ids: np.ndarray, markers: ReasoningMarkers, decode: Decode) -> "TextReasoning":
        """Of a row with this prompt. A marker in the middle of it may be data: no token says that it is none."""
        last = prompt_ids[-(len(markers.start.encode()) + _BLANK_TOKENS) :].tolist()
        return cls(markers, decode(last).rstrip().endswith(markers.start.strip()))

    def split(self, token_ids: Sequence[int], text: str, decode: Decode) -> tuple[str | None, str, int]:
        """The reasoning of `text`, the answer, both without markers, and the tokens of the reasoning. text: that of
        token_ids, or the beginning of it. None, and no tokens, where there is no marker and the prompt opened none."""
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

        places = range(len(token_ids) + 1)
        first, last = bisect_left(places, begin, key=length), bisect_right(places, end, key=length) - 1
        return text[begin:end], answer, max(last - first, 0)


Wanted = ReasoningMarkers | Literal["auto"]


class RequestReasoning:
    """Of one tokenizer: what it found for a request's markers serves the next one with the same."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._found = lru_cache(maxsize=64)(lambda wanted: marker_tokens(wanted, tokenizer))

    def why_refused(self, wanted: Wanted, has_budget: bool, has_grammar: bool) -> str | None:
        """Which of a row's options these markers cannot do; None: they can do all. Raises ConfigError where the
        tokenizer lacks them."""
        markers = self._found(wanted)
        return why_not_by_text(markers, has_budget, has_grammar) if isinstance(markers, ReasoningMarkers) else None

    def after(
        self, prompt_ids: np.ndarray, wanted: Wanted, budget: int | None, has_grammar: bool
    ) -> RowReasoning | TextReasoning:
        """Of a row with this prompt (T,) that was not refused. budget: the most tokens of reasoning; None: any number.
        has_grammar: whether the answer is held to one."""
        markers = self._found(wanted)
        if isinstance(markers, ReasoningMarkers):
            return TextReasoning.after(prompt_ids, markers, self._tokenizer.decode)
        return RowReasoning.after(prompt_ids, markers, budget, has_grammar)
