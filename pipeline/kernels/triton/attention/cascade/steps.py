"""The cascade kernel's metadata of consecutive steps, planned again only if it may have changed.

From step to step sequences grow by their own tokens, and their shared beginning stays. The plan changes if sequences
come or go, or if a context has grown past a block that others have too.
"""

import numpy as np

from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.triton.attention.cascade.metadata import CascadeShape


class CascadeSteps:
    """Keeps the last plan of steps in which the decode kernel takes all sequences."""

    def __init__(self, shape: CascadeShape) -> None:
        self._shape = shape
        self._numbers: list[np.ndarray] = []
        self._num_decisive = 0
        self._query_start_S1 = np.zeros(0, dtype=np.int32)
        self._first_SD = np.zeros((0, 0), dtype=np.int32)  # of each sequence the blocks that decide,
        self._usable_S = np.zeros(0, dtype=np.int32)  # and how many of them can be shared

    def numbers(self, where: AttentionInput) -> list[np.ndarray]:
        """`CascadeShape.numbers` of what `CascadeShape.decide` finds among all sequences. Not to be changed."""
        if not self._holds(where):
            decided = self._shape.decide(where, np.arange(len(where.context_len_S)))
            self._num_decisive, self._query_start_S1 = decided.num_decisive, where.query_start_S1.copy()
            self._first_SD, self._usable_S = self._rests_on(where)
            self._first_SD = self._first_SD.copy()
            self._numbers = self._shape.numbers(where, decided.plan)
        return self._numbers

    def numbers_among(self, where: AttentionInput, sequences: np.ndarray) -> list[np.ndarray]:
        """The same among the sequences at these indices, planned anew."""
        return self._shape.numbers(where, self._shape.decide(where, sequences).plan)

    def _holds(self, where: AttentionInput) -> bool:
        if not np.array_equal(where.query_start_S1, self._query_start_S1):
            return False
        first_SD, usable_S = self._rests_on(where)
        return np.array_equal(usable_S, self._usable_S) and np.array_equal(first_SD, self._first_SD)

    def _rests_on(self, where: AttentionInput) -> tuple[np.ndarray, np.ndarray]:
        count_S = where.query_start_S1[1:] - where.query_start_S1[:-1]
        before_S = where.context_len_S - count_S
        usable_S = np.minimum(before_S // where.block_size, self._num_decisive)
        return where.block_table_SM[:, : self._num_decisive], usable_S
