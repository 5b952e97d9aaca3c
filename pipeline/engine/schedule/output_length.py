"""How many KV blocks a sequence is expected to need until it ends, by the lengths of those that ended before. No torch.

What may be generated is often far more than what is: a job that allows 512 tokens and uses 40 would hold a tenth of the
sequences that fit. So a sequence is expected to generate what three in four of the last ones did, and at most what it
may; who outlives that is served by preemption.
"""

import numpy as np

from pipeline.engine.schedule.sequence import Sequence, SlotTable

MIN_HISTORY = 64  # finished sequences before their lengths predict others'
HISTORY = 1024
PERCENTILE = 75


class Expectation:
    """Of one scheduler. `output`: generated tokens that are expected of a sequence; None: all that it may."""

    def __init__(self, table: SlotTable, block_size: int) -> None:
        self.output: int | None = None
        self._table, self._block_size = table, block_size
        self._history = np.zeros(HISTORY, dtype=np.int64)  # generated tokens of those that finished last, a ring
        self._num_history = 0
        self._has_changed = False

    def finished(self, slots: list[int]) -> None:
        """The sequences in these slots came to their end."""
        place_N = np.arange(self._num_history, self._num_history + len(slots)) % HISTORY
        self._history[place_N] = self._table.num_known[slots] - self._table.num_prompt[slots]
        self._num_history += len(slots)
        self._has_changed = True

    def forget(self) -> None:
        """Expect nothing of coming sequences from those that finished so far."""
        self._num_history, self.output, self._has_changed = 0, None, False

    def update(self) -> None:
        """Let `output` follow those that finished."""
        if self._has_changed and self._num_history >= MIN_HISTORY:
            history = self._history[: self._num_history]
            rank = len(history) * PERCENTILE // 100
            self.output = int(np.partition(history, rank)[rank])
            self._has_changed = False

    def blocks(self, sequence: Sequence) -> int:
        """All that a sequence is expected to hold in the end."""
        limit = min(sequence.num_prompt + sequence.request.params.max_tokens, self._table.max_model_len)
        size = self._block_size
        if self.output is not None:
            limit = min(limit, max(sequence.num_prompt + self.output, len(sequence.token_ids) + size))
        return -(-limit // size)

    def missing_blocks(self, slot_S: np.ndarray) -> int:
        """What the sequences in these slots are expected to need beside the blocks that they hold."""
        table, size = self._table, self._block_size
        final_S = table.limit[slot_S]
        if self.output is not None:
            likely_S = np.maximum(table.num_prompt[slot_S] + self.output, table.num_known[slot_S] + size)
            final_S = np.minimum(final_S, likely_S)
        final_S += size - 1
        final_S //= size
        final_S -= table.num_blocks[slot_S]
        return int(np.maximum(final_S, 0, out=final_S).sum())
