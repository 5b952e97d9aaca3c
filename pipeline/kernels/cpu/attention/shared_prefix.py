"""Prefixes that several decoding sequences share, read once for all of them.

Prompts of a job often begin alike: an instruction, some examples. Prefix sharing keeps such a prefix in the cache once,
but sequences that decode side by side would each read it in every step. Here a group of them multiplies it together, as
the queries of one prompt do: its blocks are then read once, in tiles whose sums stay in registers. The kernel of
decoding combines the result with each one's own keys.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.kernels.cpu.attention.decode_kernel import UNBOUNDED
from pipeline.kernels.cpu.attention.prefill_kernel import ROWS, paged_prefill
from pipeline.kernels.cpu.compile.numerics import CacheArrays
from pipeline.kernels.cpu.compile.threads import WHOLE
from pipeline.kernels.shared_prefix import PrefixGroups, prefix_groups

_LANES = 16
"""Rows, queries times heads of a KV head, come in so many: `paged_prefill` fills up with nothing."""
_SHARED_COST = 0.4
"""Of reading a key for one row among many, by reading it for one row alone."""
_ROW_KEYS = 16
"""What a row costs beside its keys, in keys read alone: its query is copied, its result kept and read again."""
_LEAST_ELEMENTS = 1 << 19
"""Of keys of all KV heads, times the heads that share each, that are to be saved in a layer: some 100 us. Another
kernel takes 30, finding who shares what some 400 in a step."""


def pieces(start_G1: np.ndarray, size_G: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of neighbours, of which run g begins at start_G1[g], in pieces I of at most `most`: the run, the first one
    and the number of each. A run of size 0 has no pieces."""
    pieces_G = -(-size_G // most)
    group_I = np.repeat(np.arange(len(size_G)), pieces_G)
    number_I = np.arange(len(group_I)) - np.repeat(np.cumsum(pieces_G) - pieces_G, pieces_G)
    first_I = start_G1[group_I] + number_I * most
    return group_I, first_I, np.minimum(most, start_G1[group_I + 1] - first_I)


@dataclass(frozen=True)
class SharedReading:
    """Of a step's sequences S, the members P of groups that share a beginning. `paged_decode` has read_S and place_S:
    tokens that are read for sequence s, and where its result lies."""

    read_S: np.ndarray
    place_S: np.ndarray
    member_P: np.ndarray
    item_I3: np.ndarray
    position_P: np.ndarray

    @classmethod
    def of(
        cls, table_SM: np.ndarray, context_len_S: np.ndarray, block_size: int, heads: tuple[int, int, int]
    ) -> "SharedReading | None":
        """What is worth reading together; None where nothing is. heads: query heads, KV heads and their size."""
        num_heads, num_kv_heads, head_dim = heads
        group = num_heads // num_kv_heads
        least_saved = _LEAST_ELEMENTS // (num_kv_heads * head_dim)

        def saved(groups: PrefixGroups) -> np.ndarray:
            """Of each group, in keys of a head that a row reads alone."""
            rows_G = groups.size_G * group
            filled_G = -(-rows_G // _LANES) * _LANES
            keys_G = groups.blocks_G * block_size
            return keys_G * (rows_G - _SHARED_COST * filled_G) - _ROW_KEYS * rows_G

        if len(context_len_S) * group <= _SHARED_COST * _LANES:
            return None  # too few, whatever they share
        first_S = np.sort(table_SM[:, 0])
        if not (first_S[1:] == first_S[:-1]).any():  # as most steps of most jobs; takes a tenth of looking further
            return None
        # A sequence's own key is never shared, so each has something left to read.
        groups = prefix_groups(table_SM, (context_len_S - 1) // block_size, saved)
        if not len(groups.blocks_G) or saved(groups).sum() < least_saved:
            return None
        member_P, keys_G = groups.sequence_I, groups.blocks_G * block_size
        keys_P = keys_G[groups.group_I]
        read_S, place_S = np.zeros((2, len(context_len_S)), np.int64)
        read_S[member_P], place_S[member_P] = keys_P, np.arange(len(member_P))
        _, first_I, count_I = pieces(groups.start_G1, groups.size_G, max(1, ROWS // group))
        item_I3 = np.stack([member_P[first_I], first_I, count_I], axis=1)
        return cls(read_S, place_S, member_P, item_I3, keys_P - 1)

    def read(
        self, q_SND: np.ndarray, arrays: CacheArrays, table_SM: np.ndarray, scale: np.float32
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """read_S, place_S, part_PND and log_sum_PN, as `paged_decode` takes them; on threads as `use_threads` said."""
        q_PND = q_SND[self.member_P]
        part_PND = np.empty(q_PND.shape, np.float32)
        log_sum_PN = np.empty(q_PND.shape[:2], np.float32)
        shape = table_SM, self.item_I3, self.position_P, UNBOUNDED, scale
        paged_prefill(q_PND, *arrays, *shape, part_PND, log_sum_PN, q_PND, *WHOLE)  # into q_PND it writes nothing
        return self.read_S, self.place_S, part_PND, log_sum_PN
