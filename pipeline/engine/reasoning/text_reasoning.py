"""Reasoning between markers of several tokens, as models write them whose vocabulary has none of their own, such as
`<think>` in a vocabulary without it, or a sentence.

Tokens do not show where such a marker is: its first and last characters may be one token with what stands around it. So
it is looked for in the text, once the row has ended, and nothing that depends on it while the row runs goes with it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engine.reasoning.markers import KEY, ReasoningMarkers

Decode = Callable[[Sequence[int]], str]
_BLANK_TOKENS = 8  # a template's blanks after a start marker, at the most


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
