"""What the decode kernel reads of a step: which keys of which sequence each program takes. Planned on the host.

Suffixes: those of `kernels/contract.py`, and I items, P partial sums, R rows of a tile (queries times heads).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.transfer import staging_buffer
from pipeline.kernels.triton.attention.cascade_metadata import CascadeMetadata, CascadeShape
from pipeline.kernels.triton.attention.partition import partition
from pipeline.kernels.triton.attention.staging import StagedArrays
from pipeline.kernels.triton.launch import Target, power_of_two

KEYS = 64  # of a tile
MAX_QUERIES = 8  # of a sequence that the decode kernel takes
_MAX_ROWS = 64


def most_queries(group: int) -> int:
    """Up to how many query tokens of a sequence the decode kernel takes, with `group` query heads to a KV head.

    Rows are filled up to a power of two; where the group is none, 64 of them do not fit the registers.
    """
    most_rows = _MAX_ROWS if group & (group - 1) == 0 else _MAX_ROWS // 2
    return max(1, min(MAX_QUERIES, most_rows // group))


@dataclass(frozen=True)
class DecodeItems:
    """Items in the order of the programs that take them, all int32.

    item_I4: sequence, first tile, end of the tiles, and the partial sum it leaves (-1: none, the item is the whole
    sequence). program_start: program p takes the items program_start[p] to program_start[p + 1]. split_S3: sequences
    that were split, their first partial sum and how many they are.
    """

    item_I4: np.ndarray
    program_start: np.ndarray
    split_S3: np.ndarray


def decode_items(sequence_S: np.ndarray, begin_S: np.ndarray, end_S: np.ndarray, num_programs: int) -> DecodeItems:
    """The tiles begin_S to end_S (at least one) of each sequence over `num_programs` programs: see `partition`."""
    pieces = partition(begin_S, end_S, num_programs)
    is_cut_I = pieces.pieces_S[pieces.of_I] > 1
    partial_I = np.where(is_cut_I, np.cumsum(is_cut_I) - 1, -1)
    cut_S = np.flatnonzero(pieces.pieces_S > 1)
    first_partial_S = np.cumsum(pieces.pieces_S[cut_S]) - pieces.pieces_S[cut_S]
    return DecodeItems(
        np.stack([sequence_S[pieces.of_I], pieces.begin_I, pieces.end_I, partial_I], axis=1).astype(np.int32),
        pieces.program_start.astype(np.int32),
        np.stack([sequence_S[cut_S], first_partial_S, pieces.pieces_S[cut_S]], axis=1).astype(np.int32),
    )


@dataclass(frozen=True)
class DecodeMetadata:
    """Device tensors of a fixed size that `refill` brings up to a step; the kernels read nothing else of it.

    `num_rows`: rows of a tile, of which group * `num_queries` may stand for a query: R in the names below. `window` is
    that of the layers it serves. item_I4 to context_len_S are views of `staged`, which one copy fills, as are those of
    `cascade`, which computes what sequences share at their beginning; the items are then of the rest. None: there is no
    such part.
    """

    num_programs: int
    num_queries: int
    num_rows: int
    window: int | None
    staged: StagedArrays
    item_I4: torch.Tensor
    program_start: torch.Tensor
    split_S3: torch.Tensor
    num_splits: torch.Tensor
    query_start_S1: torch.Tensor
    context_len_S: torch.Tensor
    block_table_SM: torch.Tensor  # int32
    partial_PKRD: torch.Tensor  # float32, as are the sums and maxima of their rows
    best_PKR: torch.Tensor
    sum_PKR: torch.Tensor
    cascade: CascadeMetadata | None

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
        cascade: CascadeShape | None = None,
    ) -> "DecodeMetadata":
        """For steps of at most `max_seqs` sequences of at most `max_blocks` blocks and `num_queries` query tokens.

        Twice the programs that a GPU has multiprocessors, divided among the KV heads. The partial sums take
        P * num_heads * num_queries * head_dim * 4 bytes, P being twice the programs. `cascade`: of layers without a
        window, where prefixes that sequences share are to be read once for all of them.

        Raises ValueError for more query tokens than `most_queries`.
        """
        group = num_heads // num_kv_heads
        if num_queries > most_queries(group):
            raise ValueError(
                f"{num_queries} query tokens a sequence: the decode kernel takes {most_queries(group)} at most "
                f"where {group} query heads share a KV head"
            )
        num_programs = max(1, 2 * target.num_multiprocessors // num_kv_heads)
        num_rows = power_of_two(group * num_queries, 16)
        sizes = [
            4 * (max_seqs + num_programs),
            num_programs + 1,
            3 * min(max_seqs, num_programs),
            1,
            max_seqs + 1,
            max_seqs,
        ]
        own = len(sizes)
        if cascade is not None:
            assert window is None
            sizes += cascade.sizes
        staged = StagedArrays(sizes, device)
        items, program_start, splits, num_splits, query_start_S1, context_len_S = staged.views[:own]
        rows = 2 * num_programs, num_kv_heads, group * num_queries
        return cls(
            num_programs=num_programs,
            num_queries=num_queries,
            num_rows=num_rows,
            window=window,
            staged=staged,
            item_I4=items.view(-1, 4),
            program_start=program_start,
            split_S3=splits.view(-1, 3),
            num_splits=num_splits,
            query_start_S1=query_start_S1,
            context_len_S=context_len_S,
            block_table_SM=torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device),
            partial_PKRD=torch.empty(*rows, head_dim, dtype=torch.float32, device=device),
            best_PKR=torch.empty(rows, dtype=torch.float32, device=device),
            sum_PKR=torch.empty(rows, dtype=torch.float32, device=device),
            cascade=None if cascade is None else CascadeMetadata.of(cascade, staged.views[own:]),
        )

    def refill(
        self,
        where: AttentionInput,
        sequences: np.ndarray | None = None,
        shared: Sequence[np.ndarray] = (),
        most_short: int = 0,
    ) -> None:
        """Bring the tensors up to a step: of `where`, the sequences at these indices (None: all). `shared`: what groups
        of them read together, from `CascadeShape.numbers`, for metadata with a cascade. With a window, items begin
        where it begins if a context is `most_short` tokens shorter.

        The copies are queued on the current stream and wait for nothing.
        """
        num_seqs, num_blocks = where.block_table_SM.shape
        taken_S = np.arange(num_seqs) if sequences is None else sequences
        context_S = where.context_len_S[taken_S].astype(np.int64)
        count_S = np.diff(where.query_start_S1)[taken_S]
        assert int(count_S.max(initial=0)) <= self.num_queries
        first_seen_S = np.zeros_like(context_S)
        if self.window is not None:
            first_seen_S = np.maximum(0, context_S - most_short - count_S - self.window + 1)
        if self.cascade is not None:
            first_seen_S = shared[-1][taken_S]
        items = decode_items(taken_S, first_seen_S // KEYS, -(-context_S // KEYS), self.num_programs)
        assert int(items.item_I4[:, 3].max(initial=-1)) < len(self.partial_PKRD)
        num_splits = np.array([len(items.split_S3)])
        own = items.item_I4, items.program_start, items.split_S3, num_splits, where.query_start_S1, where.context_len_S
        self.staged.fill([*own, *shared])
        table = staging_buffer((num_seqs, num_blocks), self.block_table_SM.device)
        table.numpy()[:] = where.block_table_SM
        self.block_table_SM[:num_seqs, :num_blocks].copy_(table, non_blocking=True)
