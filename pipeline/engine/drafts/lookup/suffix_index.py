"""Where the last few tokens of a text occurred before: a table of hashes of fixed size. No torch.

Every run of MIN_MATCH to MAX_MATCH tokens has an entry that says where it ended last. Entries are not chained and not
compared: a run that falls on the entry of another replaces it, and who looks something up compares the tokens
themselves. So a small table forgets, and never errs.

Shapes: N places in texts, M tokens before a place (the last one first), L lengths of runs, E entries.
"""

import numpy as np

MIN_MATCH, MAX_MATCH = 2, 8

_BACK_M = np.arange(1, MAX_MATCH + 1)
# of the hash: a polynomial modulo 2**64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SALT = np.uint64(0xD1B54A32D192ED03)
LENGTH = np.uint64(0x8CB92BA72F3D8DD7)
_FACTOR_M = np.cumprod(np.full(MAX_MATCH, GOLDEN))
_LENGTH_L = np.arange(MIN_MATCH, MAX_MATCH + 1, dtype=np.uint64) * LENGTH
_SHIFT = np.uint64(32)


def tails(tokens: np.ndarray, begin_N: np.ndarray, end_N: np.ndarray) -> np.ndarray:
    """The last MAX_MATCH tokens before place end_N of the texts that begin at tokens[begin_N]; -1 before a text."""
    place_NM = end_N[..., None] - _BACK_M
    tail_NM = tokens.take(begin_N[..., None] + np.maximum(place_NM, 0))
    tail_NM[place_NM < 0] = -1
    return tail_NM


class SuffixIndex:
    """Ends of runs of tokens, found by their hashes. A text is known by its salt; only its own runs are found in it."""

    def __init__(self, num_entries: int) -> None:
        """num_entries: rounded up to a power of two; 4 bytes each, written to once here: the first touch of a page of
        memory takes microseconds, and hashes touch all pages in the first steps with drafts, which are timed."""
        bits = max(int(num_entries - 1).bit_length(), 1)
        self.end_E = np.full(1 << bits, 0, dtype=np.int32)  # np.zeros would leave them to the first use
        self._drop = np.uint64(64 - bits)

    @property
    def num_entries(self) -> int:
        return len(self.end_E)

    def keys(self, tail_NM: np.ndarray, salt_N: np.ndarray | int) -> np.ndarray:
        """The entries (N, L) of the runs that end each tail."""
        hash_NL = np.cumsum((tail_NM + 2).astype(np.uint64) * _FACTOR_M, axis=-1)[..., MIN_MATCH - 1 :] + _LENGTH_L
        hash_NL += (np.asarray(salt_N).astype(np.uint64) * SALT)[..., None]
        hash_NL ^= hash_NL >> _SHIFT
        hash_NL *= GOLDEN
        return (hash_NL >> self._drop).astype(np.int64)

    def insert(self, key_NL: np.ndarray, end_N: np.ndarray) -> None:
        """Runs ended at these places; of equal runs the last one counts."""
        self.end_E[key_NL] = end_N[:, None]

    def find(
        self, key_NL: np.ndarray, tail_NM: np.ndarray, tokens: np.ndarray, begin_N: np.ndarray, before_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The place where the longest run that ends each tail ended before (below before_N), and that run's length.

        Of equally long ones the last. A run shorter than MIN_MATCH is reported as length 0.
        """
        end_NL = self.end_E[key_NL].astype(np.int64)
        end_NL[end_NL >= before_N[:, None]] = 0
        alike_NLM = tails(tokens, begin_N[:, None], end_NL) == tail_NM[:, None, :]
        length_NL = np.logical_and.accumulate(alike_NLM, axis=-1).sum(axis=-1)
        best_N = ((length_NL << 32) + end_NL).argmax(axis=-1)
        row_N = np.arange(len(best_N))
        length_N = length_NL[row_N, best_N]
        return end_NL[row_N, best_N], np.where(length_N >= MIN_MATCH, length_N, 0)
