"""What the decode kernel is told of a step: which keys of which sequence each program takes. Worked out on the host.

Suffixes: those of `kernels/contract.py`, and I items, P partial sums, R rows of a tile (queries times heads).
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.triton.launch import Target, power_of_two

KEYS = 64  # of a tile
MAX_QUERIES = 8  # of a sequence that the decode kernel takes
_MAX_ROWS = 64

_ALIGNED = 4  # numbers of 4 bytes: see `Launch`


def most_queries(group: int) -> int:
    """Up to how many query tokens of a sequence the decode kernel takes, with `group` query heads to a KV head."""
    return max(1, min(MAX_QUERIES, _MAX_ROWS // group))


@dataclass(frozen=True)
class Deal:
    """Items in the order of the programs that take them, int32 all.

    item_I4: sequence, first tile, tile behind the last, and the partial sum it leaves (-1: none, the item is all of
    the sequence). lane_start: lane l takes the items lane_start[l] to lane_start[l + 1]. split_S3: sequences that were
    cut, their first partial sum and how many they are.
    """

    item_I4: np.ndarray
    lane_start: np.ndarray
    split_S3: np.ndarray


def deal(sequence_S: np.ndarray, begin_S: np.ndarray, end_S: np.ndarray, num_lanes: int) -> Deal:
    """Deal the tiles begin_S to end_S (at least one) of each sequence to `num_lanes` lanes.

    Each lane takes as many tiles as any other, or up to as many in the last ones.
    """
    count_S = (end_S - begin_S).astype(np.int64)
    start_S = np.cumsum(count_S) - count_S
    total = int(count_S.sum())
    per_lane = max(1, -(-total // num_lanes))
    lane_begin = np.minimum(np.arange(num_lanes + 1) * per_lane, total)
    start_I = np.union1d(start_S, lane_begin[:-1][lane_begin[:-1] < total])
    pieces_S = np.diff(np.searchsorted(start_I, np.append(start_S, total)))
    stop_I = np.append(start_I[1:], total)
    of_I = np.repeat(np.arange(len(count_S)), pieces_S)
    shift_I = begin_S[of_I] - start_S[of_I]
    is_cut_I = pieces_S[of_I] > 1
    partial_I = np.where(is_cut_I, np.cumsum(is_cut_I) - 1, -1)
    cut_S = np.flatnonzero(pieces_S > 1)
    first_partial_S = np.cumsum(pieces_S[cut_S]) - pieces_S[cut_S]
    return Deal(
        np.stack([sequence_S[of_I], start_I + shift_I, stop_I + shift_I, partial_I], axis=1).astype(np.int32),
        np.searchsorted(start_I, lane_begin).astype(np.int32),
        np.stack([sequence_S[cut_S], first_partial_S, pieces_S[cut_S]], axis=1).astype(np.int32),
    )


@dataclass(frozen=True)
class DecodeWork:
    """Device tensors of a fixed size that `refill` brings up to a step; the kernels read nothing else of it.

    `num_rows`: rows of a tile, of which group * `num_queries` may stand for a query: R in the names below. `window` is
    that of the layers it serves. item_I4, lane_start, split_S3, num_splits, query_start_S1 and context_len_S are views
    of `numbers`, which one copy fills.
    """

    num_lanes: int
    num_queries: int
    num_rows: int
    window: int | None
    numbers: torch.Tensor  # int32
    item_I4: torch.Tensor
    lane_start: torch.Tensor
    split_S3: torch.Tensor
    num_splits: torch.Tensor
    query_start_S1: torch.Tensor
    context_len_S: torch.Tensor
    block_table_SM: torch.Tensor  # int32
    partial_PKRD: torch.Tensor  # float32, as are the sums and maxima of their rows
    best_PKR: torch.Tensor
    sum_PKR: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        target: Target,
        *,
        num_queries: int = 1,
        window: int | None = None,
    ) -> "DecodeWork":
        """For steps of at most `max_seqs` sequences of at most `max_blocks` blocks and `num_queries` query tokens.

        Twice the programs that a GPU has multiprocessors, divided among the KV heads. The partial sums take
        P * num_heads * num_queries * head_dim * 4 bytes, P being twice the lanes.

        Raises ValueError for more query tokens than `most_queries`.
        """
        group = num_heads // num_kv_heads
        if num_queries > most_queries(group):
            raise ValueError(
                f"{num_queries} query tokens a sequence: the decode kernel takes {most_queries(group)} at most "
                f"where {group} query heads share a KV head"
            )
        num_lanes = max(1, 2 * target.num_multiprocessors // num_kv_heads)
        num_rows = power_of_two(group * num_queries, 16)
        sizes = 4 * (max_seqs + num_lanes), num_lanes + 1, 3 * min(max_seqs, num_lanes), 1, max_seqs + 1, max_seqs
        aligned = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        numbers = torch.zeros(sum(aligned), dtype=torch.int32, device=device)
        views = (part[:size] for part, size in zip(numbers.split(aligned), sizes))
        items, lane_start, splits, num_splits, query_start_S1, context_len_S = views
        rows = 2 * num_lanes, num_kv_heads, group * num_queries
        return cls(
            num_lanes=num_lanes,
            num_queries=num_queries,
            num_rows=num_rows,
            window=window,
            numbers=numbers,
            item_I4=items.view(-1, 4),
            lane_start=lane_start,
            split_S3=splits.view(-1, 3),
            num_splits=num_splits,
            query_start_S1=query_start_S1,
            context_len_S=context_len_S,
            block_table_SM=torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device),
            partial_PKRD=torch.empty(*rows, head_dim, dtype=torch.float32, device=device),
            best_PKR=torch.empty(rows, dtype=torch.float32, device=device),
            sum_PKR=torch.empty(rows, dtype=torch.float32, device=device),
        )

    def refill(self, where: AttentionInput, sequences: np.ndarray | None = None, most_short: int = 0) -> None:
        """Bring the tensors up to a step: of `where`, the sequences at these indices (None: all). A window is dealt
        from where it begins if a context is `most_short` tokens shorter.

        The copies are queued on the current stream and wait for nothing.
        """
        num_seqs, num_blocks = where.block_table_SM.shape
        taken_S = np.arange(num_seqs) if sequences is None else sequences
        context_S = where.context_len_S[taken_S].astype(np.int64)
        count_S = np.diff(where.query_start_S1)[taken_S]
        assert int(count_S.max()) <= self.num_queries
        first_seen_S = np.zeros_like(context_S)
        if self.window is not None:
            first_seen_S = np.maximum(0, context_S - most_short - count_S - self.window + 1)
        dealt = deal(taken_S, first_seen_S // KEYS, -(-context_S // KEYS), self.num_lanes)
        assert int(dealt.item_I4[:, 3].max()) < len(self.partial_PKRD)
        parts = (
            (dealt.item_I4, self.item_I4),
            (dealt.lane_start, self.lane_start),
            (dealt.split_S3, self.split_S3),
            (np.array([len(dealt.split_S3)]), self.num_splits),
            (where.query_start_S1, self.query_start_S1),
            (where.context_len_S, self.context_len_S),
        )
        numbers = _staging(self.numbers.shape, self.numbers.device)
        filled, offset = numbers.numpy(), 0
        for values, into in parts:
            assert values.size <= into.numel(), "more sequences than the work was allocated for"
            filled[offset : offset + values.size] = values.ravel()
            offset += -(-into.numel() // _ALIGNED) * _ALIGNED
        self.numbers.copy_(numbers, non_blocking=True)
        table = _staging((num_seqs, num_blocks), self.numbers.device)
        table.numpy()[:] = where.block_table_SM
        self.block_table_SM[:num_seqs, :num_blocks].copy_(table, non_blocking=True)


def _staging(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 memory on the host, pinned where a GPU copies from it. torch keeps it until its copy is done."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
