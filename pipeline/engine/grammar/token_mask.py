"""Masks of the tokens that grammars allow: filled for all rows of a step at once, and laid on their logits.

Shapes: R rows of logits, M of them with a mask, V vocabulary, W 32-bit words of a mask, B bytes of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.kernels.transfer import on_device

_IS_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1
_ADDED = np.where(_IS_SET, 0.0, -np.inf).astype(np.float32)  # [256, 8]: to the logits that a byte of a mask stands for


@dataclass(frozen=True)
class TokenMask:
    """Which tokens some rows may take: bit v of a row's mask, the lowest of a word first, stands for token v."""

    row_M: np.ndarray  # int64, ascending
    bits_MW: np.ndarray  # int32

    def apply(self, z_RV: torch.Tensor, rows: np.ndarray) -> None:
        """Write -inf over what is not allowed. z_RV: the logits of `rows`, which ascend; nothing waits for the
        device."""
        here = np.flatnonzero(np.isin(self.row_M, rows))
        if not len(here):
            return
        byte_N = on_device(np.ascontiguousarray(self.bits_MW[here]).view(np.uint8), z_RV.device).int().flatten()
        added_MV = on_device(_ADDED, z_RV.device).index_select(0, byte_N).view(len(here), -1)[:, : z_RV.shape[1]]
        if len(here) == len(rows):
            z_RV.add_(added_MV)
        else:
            z_RV.index_add_(0, on_device(np.searchsorted(rows, self.row_M[here]), z_RV.device), added_MV)


class MaskFiller:
    """Fills masks on the host's cores. num_threads: at most so many at once."""

    def __init__(self, mask_words: int, vocab_size: int, num_threads: int) -> None:
        self._mask_words, self._vocab_size = mask_words, vocab_size
        self._executor = LLExecutor(num_threads)

    def fill(self, matchers: Sequence[RowMatcher], drafts: Sequence[list[int]], first_S: np.ndarray) -> TokenMask:
        """Masks for the next token of each matcher and, row by row, for the tokens after each of its drafts. first_S:
        the first row of logits of each. The matchers are as before.

        After a draft that the grammar refuses all is allowed: the rows there count for nothing. A matcher that has
        failed allows nothing.
        """
        count_S = np.array([len(ids) + 1 for ids in drafts], dtype=np.int64)
        place_S = np.cumsum(count_S) - count_S
        bits_MW = np.full((int(count_S.sum()), self._mask_words), -1, dtype=np.int32)
        places = place_S.tolist()
        asked = [(m.parser, place, ids) for m, place, ids in zip(matchers, places, drafts)]
        if plain := [(parser, place) for parser, place, ids in asked if not ids]:
            fill_next_token_bitmask_par(self._executor, plain, bits_MW)
        if drafted := [each for each in asked if each[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits_MW)
        for matcher, place in zip(matchers, places):
            if matcher.error is not None:
                bits_MW[place] = 0
        row_M = np.repeat(first_S - place_S, count_S) + np.arange(len(bits_MW))
        return TokenMask(row_M, bits_MW)

    def allows_nothing(self, matcher: RowMatcher) -> bool:
        """Whether no token of the vocabulary can follow."""
        (mask_W,) = self.fill([matcher], [[]], np.zeros(1, dtype=np.int64)).bits_MW
        return not np.unpackbits(mask_W.view(np.uint8), bitorder="little")[: self._vocab_size].any()
