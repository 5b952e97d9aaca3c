"""Recently finished outputs, and an index of the runs of tokens in them. No torch."""

import numpy as np

from pipeline.engine.drafts.lookup.compiled_lookup import BORDER, MAX_MATCH, MIN_MATCH, index_runs, new_table

_FIRST = 2  # index of the first output: after two borders, so that the array's start matches nothing


class FinishedOutputs:
    """About the last `capacity` tokens of finished outputs, with borders between them; the oldest are overwritten."""

    def __init__(self, capacity: int) -> None:
        assert capacity > MAX_MATCH + 2
        self.end_E = new_table(8 * capacity)
        self.tokens = np.full(capacity, BORDER, dtype=np.int32)
        self._end = _FIRST

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens kept of one output."""
        return len(self.tokens) - _FIRST - 1

    def add(self, output: np.ndarray) -> int:
        """Add an output; of one longer than the capacity, its end. Return the index of its first token; 0: it was too
        short and was left out."""
        output = output[-self.max_tokens :]
        if len(output) <= MIN_MATCH:
            return 0
        if self._end + len(output) >= len(self.tokens):
            self.tokens[self._end :] = BORDER
            self._end = _FIRST
        begin, end = self._end, self._end + len(output)
        self.tokens[begin:end] = output
        self.tokens[end] = BORDER
        self._end = end + 1
        index_runs(self.tokens, begin, end, self.end_E)
        return begin
