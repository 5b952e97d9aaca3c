"""Outputs that finished not long ago, and where runs of tokens occurred in them. No torch."""

import numpy as np

from pipeline.engine.drafts.lookup.compiled_lookup import BORDER, MAX_MATCH, MIN_MATCH, index_runs, new_table

_FIRST = 2  # place of an output: two borders, so that what is before the first one is not taken for the array's begin


class FinishedOutputs:
    """About the last `capacity` tokens of finished outputs, with borders between them; the oldest are overwritten."""

    def __init__(self, capacity: int) -> None:
        assert capacity > MAX_MATCH + 2
        self.end_E = new_table(8 * capacity)
        self.tokens = np.full(capacity, BORDER, dtype=np.int32)
        self._at = _FIRST

    @property
    def most_tokens(self) -> int:
        """That are kept of one output."""
        return len(self.tokens) - _FIRST - 1

    def add(self, output: np.ndarray) -> int:
        """Remember an output; of one longer than the capacity its end. Return the place of its first token; 0: it was
        left out, too short to be of use."""
        output = output[-self.most_tokens :]
        if len(output) <= MIN_MATCH:
            return 0
        if self._at + len(output) >= len(self.tokens):
            self.tokens[self._at :] = BORDER
            self._at = _FIRST
        begin, end = self._at, self._at + len(output)
        self.tokens[begin:end] = output
        self.tokens[end] = BORDER
        self._at = end + 1
        index_runs(self.tokens, begin, end, self.end_E)
        return begin
