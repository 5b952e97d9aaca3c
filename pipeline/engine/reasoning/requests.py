"""Reasoning of a tokenizer's requests: the form of tracking that its markers need."""

from functools import lru_cache
from typing import Literal

import numpy as np

from pipeline.engine.reasoning.channels import ChannelReasoning
from pipeline.engine.reasoning.markers import ChannelTokens, ReasoningMarkers, Vocabulary, marker_tokens
from pipeline.engine.reasoning.tracking import RowReasoning, TextReasoning, text_unsupported_reason

Wanted = ReasoningMarkers | Literal["auto"]


class RequestReasoning:
    """Reasoning of one tokenizer's requests. Markers are looked up once for equal settings."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._found = lru_cache(maxsize=64)(lambda wanted: marker_tokens(wanted, tokenizer))

    def unsupported_reason(self, wanted: Wanted, has_budget: bool, has_grammar: bool) -> str | None:
        """Return why these markers do not support a row's options; None if they do. Raises ConfigError if the tokenizer
        lacks them."""
        markers = self._found(wanted)
        return (
            text_unsupported_reason(markers, has_budget, has_grammar) if isinstance(markers, ReasoningMarkers) else None
        )

    def after(
        self, prompt_ids: np.ndarray, wanted: Wanted, budget: int | None, has_grammar: bool
    ) -> RowReasoning | TextReasoning:
        """Build for a row with this prompt (T,) that `unsupported_reason` accepted. budget: maximum number of reasoning
        tokens; None: unlimited. has_grammar: whether the answer is constrained by one."""
        markers = self._found(wanted)
        if isinstance(markers, ReasoningMarkers):
            return TextReasoning.after(prompt_ids, markers, self._tokenizer.decode)
        if isinstance(markers, ChannelTokens):
            return ChannelReasoning.after(prompt_ids, markers, budget, has_grammar)
        return RowReasoning.after(prompt_ids, markers, budget, has_grammar)
