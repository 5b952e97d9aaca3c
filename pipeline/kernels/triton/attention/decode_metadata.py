"""Metadata of the decode kernel: the keys of each sequence that each program computes. Planned on the host.

Suffixes: those of `kernels/contract.py`, I items, P partial sums, R rows of a tile (queries times heads).
"""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.triton.attention.cascade_metadata import CascadeMetadata, CascadeNumbers, CascadeShape
from pipeline.kernels.triton.attention.partition import partition
from pipeline.kernels.triton.attention.staging import StagedArrays
from pipeline.kernels.triton.launch import CompileTarget, power_of_two

KEYS = 64  # per tile
MIN_TILES = 4
"""Minimum tiles of each program but the last. `_combine` adds partial sums one after the other: on an H200, 43 programs
of 3 tiles took 5 us longer than 32 of 4."""
MAX_QUERIES = 8  # per sequence of the decode kernel
_MAX_ROWS = 64
_FP8_PROGRAM_BYTES = 56 << 10  # shared memory of a program with 16 rows and heads of 128


def max_queries_of(group: int, head_dim: int) -> int:
    """Return the maximum query tokens per sequence in the decode kernel, for `group` query heads per KV head.

    Rows are padded to a power of two. If the group is not a power of two, or heads are large, 64 rows do not fit into
    registers.
    """
    max_rows = _MAX_ROWS if group & (group - 1) == 0 and head_dim <= 256 else _MAX_ROWS // 2
    return max(1, min(MAX_QUERIES, max_rows // group))


def num_programs_of(
    target: CompileTarget, num_heads: int, num_kv_heads: int, head_dim: int, num_queries: int, is_fp8: bool
) -> int:
    """Return the number of programs per KV head: those that fit on the GPU at once, divided among the KV heads."""
    num_rows = power_of_two(num_heads // num_kv_heads * num_queries, 16)
    per_multiprocessor, _ = programs_and_warps(target, num_rows, head_dim, is_fp8)
    return max(1, per_multiprocessor * target.num_multiprocessors // num_kv_heads)


def programs_and_warps(target: CompileTarget, num_rows: int, head_dim: int, is_fp8: bool) -> tuple[int, int]:
    """Return the programs per multiprocessor and the warps per program.

    Converting the tiles of an FP8 cache takes instructions, and programs of two warps wait less for each other. More
    than 16 rows do not fit into their registers.
    """
    if head_dim > 256 and num_rows > 16:  # whose sums do not fit into the registers of 4 warps
        return 1, 8
    is_small = is_fp8 and num_rows == 16 and head_dim <= 128
    return (4, 2) if is_small and target.max_shared_bytes >= 4 * _FP8_PROGRAM_BYTES else (2, 4)


T = TypeVar("T")


class DecodeNumbers(NamedTuple, Generic[T]):
    """Numbers of a step for the decode kernel, int32: their sizes, their arrays or their tensors. Items are in the
    order of the programs that compute them.

    item_I4: sequence, first tile, end of the tiles, index of its partial sum (-1: none, the item is the whole
    sequence). program_start: program p computes the items program_start[p] to program_start[p + 1]. split_S3: sequences
    that were split, their first partial sum and the number of them. num_splits: number of these sequences.
    """

    item_I4: T
    program_start: T
    split_S3: T
    num_splits: T


def decode_items(
    sequence_S: np.ndarray, begin_S: np.ndarray, end_S: np.ndarray, num_programs: int
) -> DecodeNumbers[np.ndarray]:
    """Divide the tiles begin_S to end_S (at least one) of each sequence among the programs: see `partition`."""
    pieces = partition(begin_S, end_S, num_programs, MIN_TILES)
    is_cut_I = pieces.pieces_S[pieces.of_I] > 1
    partial_I = np.where(is_cut_I, np.cumsum(is_cut_I) - 1, -1)
    cut_S = np.flatnonzero(pieces.pieces_S > 1)
    first_partial_S = np.cumsum(pieces.pieces_S[cut_S]) - pieces.pieces_S[cut_S]
    return DecodeNumbers(
        item_I4=np.stack([sequence_S[pieces.of_I], pieces.begin_I, pieces.end_I, partial_I], axis=1),
        program_start=pieces.program_start,
        split_S3=np.stack([sequence_S[cut_S], first_partial_S, pieces.pieces_S[cut_S]], axis=1),
        num_splits=np.array([len(cut_S)]),
    )


class SequenceTensors(NamedTuple):
    """Tensors of a step's sequences, int32: see `AttentionInput`."""

    query_start_S1: torch.Tensor
    context_len_S: torch.Tensor
    block_table_SM: torch.Tensor


@dataclass(frozen=True)
class DecodeMetadata:
    """Device tensors of fixed size with a step's numbers, which are all that the kernels read of the step.

    num_rows: rows of a tile; group * `num_queries` of them can be queries (R in the names below). window: that of the
    layers it serves. cascade: computes shared prefixes, and the items cover the rest; None: no shared prefixes. The
    tensors that change from step to step are views of `staged`, which `prepare_replay` fills in one copy; None: the
    owner of the tensors fills them.
    """

    num_programs: int
    num_queries: int
    num_rows: int
    window: int | None
    staged: StagedArrays | None
    numbers: DecodeNumbers[torch.Tensor]
    sequences: SequenceTensors
    partial_PKRD: torch.Tensor  # float32, like the maxima and sums of its rows
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
        target: CompileTarget,
        *,
        num_queries: int = 1,
        window: int | None = None,
        cascade: CascadeShape | None = None,
        is_fp8: bool = False,
    ) -> "DecodeMetadata":
        """Allocate tensors for steps of up to `max_seqs` sequences of up to `max_blocks` blocks and `num_queries` query
        tokens.

        Raises ValueError for more query tokens than `max_queries_of`.
        """
        num_programs = num_programs_of(target, num_heads, num_kv_heads, head_dim, num_queries, is_fp8)
        sizes, cascade_sizes = cls.sizes(max_seqs, num_programs), () if cascade is None else cascade.sizes
        staged = StagedArrays([*sizes, *cascade_sizes, max_seqs + 1, max_seqs, max_seqs * max_blocks], device)
        views = iter(staged.views)
        numbers = DecodeNumbers(*islice(views, len(sizes)))
        made = cls.from_tensors(
            numbers,
            None if cascade is None else CascadeMetadata.for_steps(cascade, islice(views, len(cascade_sizes))),
            SequenceTensors(next(views), next(views), next(views).view(max_seqs, max_blocks)),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_queries=num_queries,
            window=window,
        )
        return replace(made, staged=staged)

    @staticmethod
    def sizes(max_seqs: int, num_programs: int) -> DecodeNumbers[int]:
        """Return the sizes of the flat tensors."""
        return DecodeNumbers(
            item_I4=4 * (max_seqs + num_programs),
            program_start=num_programs + 1,
            split_S3=3 * min(max_seqs, num_programs),
            num_splits=1,
        )

    @classmethod
    def from_tensors(
        cls,
        numbers: DecodeNumbers[torch.Tensor],
        cascade: CascadeMetadata | None,
        sequences: SequenceTensors,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_queries: int,
        window: int | None,
    ) -> "DecodeMetadata":
        """Build the metadata on flat tensors of these `sizes`.

        The partial sums take P * num_heads * num_queries * head_dim * 4 bytes; P is twice the number of programs.
        cascade: only for layers without a window, to read shared prefixes once.

        Raises ValueError for more query tokens than `max_queries_of`.
        """
        group = num_heads // num_kv_heads
        if num_queries > (limit := max_queries_of(group, head_dim)):
            raise ValueError(
                f"{num_queries} query tokens per sequence: the decode kernel supports up to {limit} with {group} query "
                f"heads per KV head of size {head_dim}"
            )
        assert window is None or cascade is None
        num_programs, device = len(numbers.program_start) - 1, numbers.item_I4.device
        rows = 2 * num_programs, num_kv_heads, group * num_queries
        return cls(
            num_programs=num_programs,
            num_queries=num_queries,
            num_rows=power_of_two(group * num_queries, 16),
            window=window,
            staged=None,
            numbers=numbers._replace(item_I4=numbers.item_I4.view(-1, 4), split_S3=numbers.split_S3.view(-1, 3)),
            sequences=sequences,
            partial_PKRD=torch.empty(*rows, head_dim, dtype=torch.float32, device=device),
            best_PKR=torch.empty(rows, dtype=torch.float32, device=device),
            sum_PKR=torch.empty(rows, dtype=torch.float32, device=device),
            cascade=cascade,
        )

    def prepare_replay(
        self,
        attn_metadata: AttentionInput,
        sequences: np.ndarray | None = None,
        shared: CascadeNumbers[np.ndarray] | None = None,
    ) -> None:
        """Update its tensors to a step; see `numbers_of`. The copy is queued on the current stream, without waiting."""
        assert self.staged is not None
        table_SM, shape = attn_metadata.block_table_SM, self.sequences.block_table_SM.shape
        if table_SM.shape != shape:
            table_SM = np.zeros(shape, dtype=np.int32)
            table_SM[: len(attn_metadata.block_table_SM), : attn_metadata.block_table_SM.shape[1]] = (
                attn_metadata.block_table_SM
            )
        numbers = self.numbers_of(attn_metadata, sequences, shared)
        arrays = attn_metadata.query_start_S1, attn_metadata.context_len_S, table_SM
        self.staged.fill([*numbers, *(shared or ()), *arrays])

    def numbers_of(
        self,
        attn_metadata: AttentionInput,
        sequences: np.ndarray | None = None,
        shared: CascadeNumbers[np.ndarray] | None = None,
    ) -> DecodeNumbers[np.ndarray]:
        """Return the numbers of a step: the sequences of `attn_metadata` at these indices (None: all). shared: for
        metadata with a cascade."""
        index_S = np.arange(len(attn_metadata.context_len_S)) if sequences is None else sequences
        context_S = attn_metadata.context_len_S[index_S].astype(np.int64)
        count_S = np.diff(attn_metadata.query_start_S1)[index_S]
        assert int(count_S.max(initial=0)) <= self.num_queries
        first_seen_S = np.zeros_like(context_S)
        if self.window is not None:
            first_seen_S = np.maximum(0, context_S - count_S - self.window + 1)
        if shared is not None:
            first_seen_S = shared.shared_S[index_S]
        items = decode_items(index_S, first_seen_S // KEYS, -(-context_S // KEYS), self.num_programs)
        assert int(items.item_I4[:, 3].max(initial=-1)) < len(self.partial_PKRD)
        return items
