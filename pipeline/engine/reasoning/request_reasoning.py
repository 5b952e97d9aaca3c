"""From a request's `reasoning` to what follows its row: marker tokens while it runs (`row_reasoning.py`), or its text
once it has ended (`text_reasoning.py`)."""

from functools import lru_cache
from typing import Literal

import numpy as np

from pipeline.engine.reasoning.marker_tokens import marker_tokens
from pipeline.engine.reasoning.markers import ReasoningMarkers
from pipeline.engine.reasoning.row_reasoning import RowReasoning
from pipeline.engine.reasoning.text_reasoning import TextReasoning, why_not_by_text
from pipeline.tokenization.tokenizer import Tokenizer

Wanted = ReasoningMarkers | Literal["auto"]


class RequestReasoning:
    """Of one tokenizer: what it found for a request's markers serves the next one with the same."""

    def __init__(self, tokenizer: Tokenizer) -> None:
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
