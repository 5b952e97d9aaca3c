"""One row's reasoning: whether it is in it, how long it may be, and its tokens apart from the answer's. No torch.

A row reasons from its first token on, or not at all: its prompt ends within reasoning, as chat templates of some models
write it, or its first token is the start marker. The first end marker after that is where the answer begins. All of it
follows from the tokens alone, so it is the same after a preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pipeline.engine.reasoning.markers import MarkerTokens


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

    def split(self, token_ids: Sequence[int]) -> tuple[list[int] | None, list[int]]:
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
