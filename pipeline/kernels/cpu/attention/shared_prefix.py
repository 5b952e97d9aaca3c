"""Prefixes shared by several decoding sequences, read once per group of sequences.

Prompts of a job often begin alike: an instruction, some examples. Prefix caching stores such a prefix once, but each
decoding sequence would read it in every step. Here a group of sequences attends to it together, like the queries of one
prompt: its blocks are read once, in tiles whose sums stay in registers. The decode kernel merges the result with each
sequence's own keys.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.kernels.cpu.attention.decode_kernel import NO_SINKS, UNBOUNDED, SoftmaxOptions
from pipeline.kernels.cpu.attention.prefill_kernel import ROWS, paged_prefill
from pipeline.kernels.cpu.compile.numerics import CacheArrays
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS
from pipeline.kernels.shared_prefix import PrefixGroups, prefix_groups

_LANES = 16
"""`paged_prefill` pads the rows (queries times heads of a KV head) to a multiple of this."""
_SHARED_COST = 0.4
"""Cost of reading a key for one of many rows, relative to reading it for a single row."""
_ROW_KEYS = 16
"""Overhead per row, in units of one unshared key read: its query is copied, its result stored and read again."""
_MIN_ELEMENTS = 1 << 19
"""Minimum savings per layer, in key elements of all KV heads times the heads that share each: about 100 us. The extra
kernel takes 30 us, finding the groups about 400 us per step."""


def pieces(start_G1: np.ndarray, size_G: np.ndarray, max_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split run g, of size_G[g] elements from start_G1[g] on, into pieces I of up to `max_size` elements.

    Return the run, the first element and the size of each piece. An empty run has no pieces.
    """
    pieces_G = -(-size_G // max_size)
    group_I = np.repeat(np.arange(len(size_G)), pieces_G)
    number_I = np.arange(len(group_I)) - np.repeat(np.cumsum(pieces_G) - pieces_G, pieces_G)
    first_I = start_G1[group_I] + number_I * max_size
    return group_I, first_I, np.minimum(max_size, start_G1[group_I + 1] - first_I)


@dataclass(frozen=True)
class SharedReading:
    """Members P of the groups of a step's sequences S that share a prefix.

    Arguments of `paged_decode`: read_S, the number of keys read for sequence s, and place_S, the index of its result.
    """

    read_S: np.ndarray
    part_index_S: np.ndarray
    member_P: np.ndarray
    item_I3: np.ndarray
    position_P: np.ndarray

    @classmethod
    def from_block_table(
        cls, table_SM: np.ndarray, context_len_S: np.ndarray, block_size: int, heads: tuple[int, int, int]
    ) -> "SharedReading | None":
        """Return the prefixes to read once; None if it does not pay. heads: query heads, KV heads and head size."""
        num_heads, num_kv_heads, head_dim = heads
        group = num_heads // num_kv_heads
        min_saved = _MIN_ELEMENTS // (num_kv_heads * head_dim)

        def saved(groups: PrefixGroups) -> np.ndarray:
            """Return the savings of each group, in unshared key reads of one head and row."""
            rows_G = groups.size_G * group
            filled_G = -(-rows_G // _LANES) * _LANES
            keys_G = groups.blocks_G * block_size
            return keys_G * (rows_G - _SHARED_COST * filled_G) - _ROW_KEYS * rows_G

        if len(context_len_S) * group <= _SHARED_COST * _LANES:
            return None  # too few rows, whatever they share
        first_S = np.sort(table_SM[:, 0])
        if not (first_S[1:] == first_S[:-1]).any():  # most steps of most jobs; a tenth of the cost of the full search
            return None
        # A sequence's own key is never shared, so each sequence keeps something to read.
        groups = prefix_groups(table_SM, (context_len_S - 1) // block_size, saved)
        if not len(groups.blocks_G) or saved(groups).sum() < min_saved:
            return None
        member_P, keys_G = groups.sequence_I, groups.blocks_G * block_size
        keys_P = keys_G[groups.group_I]
        read_S, part_index_S = np.zeros((2, len(context_len_S)), np.int64)
        read_S[member_P], part_index_S[member_P] = keys_P, np.arange(len(member_P))
        _, first_I, count_I = pieces(groups.start_G1, groups.size_G, max(1, ROWS // group))
        item_I3 = np.stack([member_P[first_I], first_I, count_I], axis=1)
        return cls(read_S, part_index_S, member_P, item_I3, keys_P - 1)

    def read(
        self, q_SND: np.ndarray, arrays: CacheArrays, table_SM: np.ndarray, options: SoftmaxOptions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return read_S, place_S, part_PND and log_sum_PN of `paged_decode`, on the threads set by `use_threads`.

        `paged_decode` adds the sinks.
        """
        q_PND = q_SND[self.member_P]
        part_PND = np.empty(q_PND.shape, np.float32)
        log_sum_PN = np.empty(q_PND.shape[:2], np.float32)
        options = options._replace(window=UNBOUNDED, sinks_N=NO_SINKS)
        items = table_SM, self.item_I3, self.position_P
        paged_prefill(
            q_PND, *arrays, *items, *options, part_PND, log_sum_PN, q_PND, *ALL_ITEMS
        )  # writes nothing to q_PND
        return self.read_S, self.part_index_S, part_PND, log_sum_PN
