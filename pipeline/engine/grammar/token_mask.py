"""Masks of the tokens that grammars allow: filled for the rows of a step that need one, and applied to their logits.

Most rows need none: if a grammar accepts the best token of a row, that is also the best token under the mask.

Shapes: R rows of logits, M of them with a grammar, V vocabulary, W 32-bit words of a mask, B bytes of one.
"""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.engine.stats import EngineStats
from pipeline.kernels.memory import on_device

if TYPE_CHECKING:
    from llguidance import LLExecutor

_IS_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1
_ADDED = np.where(_IS_SET, 0.0, -np.inf).astype(np.float32)  # [256, 8]: added to the logits that a mask byte covers
_MIN_PARALLEL_US = 1000  # for less work, waking the other threads takes longer than they save

FillMasks = Callable[[Sequence[RowMatcher], np.ndarray, np.ndarray], None]
"""Fills the masks of these matchers into these rows of the bits."""


class TokenMask:
    """Allowed tokens of some rows: bit v of a row's mask, the lowest of a word first, is set if token v is allowed.

    row_M (int64, ascending): the rows. bits_MW (int32): their masks; if `missing` has a matcher at an index, that mask
    is not filled yet, and `fill` fills it when it is needed.
    """

    def __init__(
        self,
        row_M: np.ndarray,
        bits_MW: np.ndarray,
        missing: Sequence[RowMatcher | None] = (),
        fill: FillMasks | None = None,
    ) -> None:
        self.row_M, self.bits_MW, self._fill = row_M, bits_MW, fill
        self._missing: list[RowMatcher | None] = list(missing) or [None] * len(row_M)

    def refused(self, token_id_R: np.ndarray) -> np.ndarray:
        """Return the rows whose grammar does not allow their token. token_id_R: a token for each row of logits."""
        token_M = token_id_R[self.row_M]
        pairs = zip(self._missing, token_M.tolist())
        indices = [p for p, (matcher, token) in enumerate(pairs) if matcher is not None and not matcher.accepts(token)]
        if None in self._missing:
            is_filled_M = np.array([matcher is None for matcher in self._missing])
            allowed_M = self.bits_MW[np.arange(len(token_M)), token_M >> 5] >> (token_M & 31) & 1
            indices = sorted([*indices, *np.flatnonzero(is_filled_M & (allowed_M == 0)).tolist()])
        return self.row_M[indices]

    def also(self, row_N: np.ndarray, token_id_N: np.ndarray) -> None:
        """Allow one more token in each of these rows."""
        index_N, token_id_N = np.searchsorted(self.row_M, row_N), token_id_N.astype(np.uint32)
        self.fill(index_N)
        self.bits_MW.view(np.uint32)[index_N, token_id_N >> 5] |= np.uint32(1) << (token_id_N & 31)

    def with_rows(self, row_N: np.ndarray, token_id_N: np.ndarray) -> "TokenMask":
        """Return this mask with additional rows that allow one token each."""
        row_M = np.concatenate([self.row_M, row_N])
        order = np.argsort(row_M)
        bits_MW = np.concatenate([self.bits_MW, np.zeros((len(row_N), self.bits_MW.shape[1]), dtype=np.int32)])[order]
        missing = [*self._missing, *[None] * len(row_N)]
        together = TokenMask(row_M[order], bits_MW, [missing[index] for index in order.tolist()], self._fill)
        together.also(row_N, token_id_N)
        return together

    def apply(self, z_RV: torch.Tensor, rows: np.ndarray) -> None:
        """Set the logits of forbidden tokens to -inf. z_RV: the logits of `rows` (ascending). Does not wait for the
        device."""
        index_M = np.minimum(np.searchsorted(rows, self.row_M), len(rows) - 1)
        present = np.flatnonzero(rows[index_M] == self.row_M)
        if not len(present):
            return
        self.fill(present)
        bytes_MB = self.bits_MW[present].view(np.uint8)
        if z_RV.device.type == "cpu":
            z = z_RV.numpy()
            is_set_MV = np.unpackbits(bytes_MB, axis=1, count=z.shape[1], bitorder="little").view(bool)
            z[index_M[present]] = np.where(is_set_MV, z[index_M[present]], -np.inf)
            return
        byte_N = on_device(bytes_MB, z_RV.device).int().flatten()
        added_MV = on_device(_ADDED, z_RV.device).index_select(0, byte_N).view(len(present), -1)[:, : z_RV.shape[1]]
        if len(present) == len(rows):
            z_RV.add_(added_MV)
        else:
            z_RV.index_add_(0, on_device(index_M[present], z_RV.device), added_MV)

    def fill(self, index_N: np.ndarray) -> None:
        """Fill the masks at these indices of row_M unless they are filled already."""
        found = [(index, matcher) for index in index_N.tolist() if (matcher := self._missing[index]) is not None]
        if found:
            assert self._fill is not None
            self._fill([matcher for _, matcher in found], self.bits_MW, np.array([index for index, _ in found]))
        for index, _ in found:
            self._missing[index] = None


class MaskFiller:
    """Fills masks on the host's cores, and counts them in `stats`. num_threads: maximum threads."""

    def __init__(self, mask_words: int, vocab_size: int, num_threads: int, stats: EngineStats) -> None:
        self._mask_words, self._vocab_size, self._num_threads, self._stats = mask_words, vocab_size, num_threads, stats
        self._executor: LLExecutor | None = None
        self._mask_us = 0.0  # thread time of one mask, from the last fill

    def mask(self, matchers: Sequence[RowMatcher], row_M: np.ndarray) -> TokenMask:
        """Return masks for the next token of each matcher, whose rows of logits are row_M. Masks of open matchers are
        filled only when they are needed."""
        mask = TokenMask(row_M, self._unset(len(matchers)), matchers, self._fill)
        if closed := [index for index, matcher in enumerate(matchers) if not matcher.is_open]:
            mask.fill(np.array(closed))
        return mask

    def mask_with_drafts(
        self, matchers: Sequence[RowMatcher], drafts: Sequence[list[int]], first_S: np.ndarray
    ) -> TokenMask:
        """Return masks for the next token of each matcher and the tokens after each of its drafts. first_S: the first
        row of logits of each. The matchers' states are unchanged.

        After a draft that the grammar rejects everything is allowed, because these rows are not used. A failed matcher
        allows nothing.
        """
        count_S = np.array([len(ids) + 1 for ids in drafts], dtype=np.int64)
        begin_S = np.cumsum(count_S) - count_S
        bits_MW = self._unset(int(count_S.sum()))
        bits_MW.fill(-1)
        plain = np.flatnonzero(count_S == 1)
        self._fill([matchers[s] for s in plain.tolist()], bits_MW, begin_S[plain])
        if len(plain) < len(matchers):
            drafted, begun_ns = np.flatnonzero(count_S > 1).tolist(), perf_counter_ns()
            from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens

            requests = [(matchers[s].parser, int(begin_S[s]), drafts[s]) for s in drafted]
            fill_next_token_bitmask_par_with_draft_tokens(self._threads(), requests, bits_MW)
            self._clear_failed([matchers[s] for s in drafted], bits_MW, begin_S[drafted])
            self._count(int(count_S[drafted].sum()), begun_ns)
        return TokenMask(np.repeat(first_S - begin_S, count_S) + np.arange(len(bits_MW)), bits_MW)

    def allows_nothing(self, matcher: RowMatcher) -> bool:
        """Return whether no token of the vocabulary can follow."""
        bits_MW = self._unset(1)
        self._fill([matcher], bits_MW, np.zeros(1, dtype=np.int64))
        return not np.unpackbits(bits_MW[0].view(np.uint8), bitorder="little")[: self._vocab_size].any()

    def _unset(self, num_masks: int) -> np.ndarray:
        """Return uninitialised masks: for a large vocabulary and many rows they are megabytes, mostly never read."""
        return np.empty((num_masks, self._mask_words), dtype=np.int32)

    def _fill(self, matchers: Sequence[RowMatcher], bits_MW: np.ndarray, indices: np.ndarray) -> None:
        if not matchers:
            return
        begun_ns, is_parallel = perf_counter_ns(), self._is_parallel(len(matchers))
        if is_parallel:
            from llguidance.numpy import fill_next_token_bitmask_par

            requests = [(matcher.parser, index) for matcher, index in zip(matchers, indices.tolist())]
            fill_next_token_bitmask_par(self._threads(), requests, bits_MW)
        else:
            address, row_bytes = bits_MW.ctypes.data, bits_MW.shape[1] * bits_MW.itemsize
            for matcher, index in zip(matchers, indices.tolist()):
                matcher.parser.unsafe_compute_mask_ptr(address + index * row_bytes, row_bytes)
        self._clear_failed(matchers, bits_MW, indices)
        elapsed_us = self._count(len(matchers), begun_ns)
        self._mask_us = elapsed_us * (self._num_threads if is_parallel else 1) / len(matchers)

    def _is_parallel(self, num_masks: int) -> bool:
        return self._num_threads > 1 and self._mask_us * num_masks > _MIN_PARALLEL_US

    def _count(self, num_masks: int, begun_ns: int) -> int:
        elapsed_us = (perf_counter_ns() - begun_ns) // 1000
        self._stats.filled_masks += num_masks
        self._stats.mask_us += elapsed_us
        return elapsed_us

    def _clear_failed(self, matchers: Sequence[RowMatcher], bits_MW: np.ndarray, indices: np.ndarray) -> None:
        """Clear the masks of failed matchers, which allow nothing."""
        for matcher, index in zip(matchers, indices.tolist()):
            if matcher.error is not None:
                bits_MW[index] = 0

    def _threads(self) -> "LLExecutor":
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        return self._executor
