"""Outputs that finished not long ago, and where runs of tokens occurred in them. No torch."""

from collections.abc import Callable

import numpy as np

from pipeline.engine.drafts.lookup.suffix_index import MAX_MATCH, MIN_MATCH, SuffixIndex, tails

BORDER = -2  # between outputs: no token, and not what stands before a text either
_FIRST = 2  # place of an output: two borders, so that what is before the first one is not taken for the array's begin


class FinishedOutputs:
    """About the last `capacity` tokens of finished outputs, with borders between them; the oldest are overwritten."""

    def __init__(self, capacity: int, index_runs: Callable[..., None] | None = None) -> None:
        """index_runs: `compiled_lookup.index_runs`, which does that in a tenth of the time; None: numpy."""
        assert capacity > MAX_MATCH + 2
        self._index_runs = index_runs or self._index
        self.index = SuffixIndex(8 * capacity)
        self.tokens = np.full(capacity, BORDER, dtype=np.int32)
        self._at = _FIRST

    @property
    def most_tokens(self) -> int:
        """That are kept of one output."""
        return len(self.tokens) - _FIRST - 1

    @property
    def is_empty(self) -> bool:
        return bool(self.tokens[_FIRST] == BORDER)

    def add(self, output: np.ndarray) -> int:
        """Remember an output; of one longer than the capacity its end. The place of its first token; 0: it was left
        out, too short to be of use."""
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
        self._index_runs(self.tokens, begin, end, self.index.end_E)
        return begin

    def find(self, tail_NM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the longest run that ends each tail ended, and its length; 0 where there is none."""
        begin_N = np.zeros(len(tail_NM), dtype=np.int64)
        everywhere_N = np.full(len(tail_NM), len(self.tokens))
        return self.index.find(self.index.keys(tail_NM, 0), tail_NM, self.tokens, begin_N, everywhere_N)

    def after(self, end_N: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (N, num_tokens) that followed there, and how many of them belong to the same output."""
        place_NK = np.minimum(end_N[:, None] + np.arange(num_tokens), len(self.tokens) - 1)
        token_NK = self.tokens.take(place_NK)
        outside_NK = token_NK == BORDER
        return token_NK, np.where(outside_NK.any(axis=1), outside_NK.argmax(axis=1), num_tokens)

    def _index(self, tokens: np.ndarray, begin: int, end: int, end_E: np.ndarray) -> None:
        end_N = np.arange(begin + MIN_MATCH, end)  # a run at the very end has nothing after it
        self.index.insert(self.index.keys(tails(tokens, np.zeros_like(end_N), end_N), 0), end_N)
