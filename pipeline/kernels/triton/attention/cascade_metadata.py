"""Metadata of the cascade kernel: groups of sequences that begin with the same blocks, and the tiles of their queries.
Planned on the host.

If each of n sequences reads its own context, shared keys and values are read n times. The cascade kernel reads them
once per tile of queries, but writes partial sums in float32, which the decode kernel reads again. A group is used if
that saves bytes. All groups of a step must save more than a launch costs; else each sequence reads its whole context.
Bytes are counted for a 16-bit cache.

Suffixes: those of `kernels/contract.py`, G groups, I members of groups, P positions in the list of tokens, W tiles of
queries, U items.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.shared_prefix import PrefixGroups, prefix_groups
from pipeline.kernels.triton.attention.partition import partition
from pipeline.kernels.triton.attention.prefill import rows_of
from pipeline.kernels.triton.launch import CompileTarget

UNIT = 128
"""Number of keys. A shared prefix is a multiple of it; the key tiles of all kernels divide it."""

MIN_SAVED_BYTES = 1 << 17
"""Minimum savings per layer and multiprocessor. The launch and the load of the first key tile take about 4 us; an A100
or H100 reads 80 to 100 KiB per multiprocessor in that time."""
MAX_SUM_BYTES = 1 << 27
_VALUE_BYTES = 2
_SUM_BYTES = 4


@dataclass(frozen=True)
class CascadePlan:
    """Groups worth sharing: their members, tokens of their prefixes, and tiles of their queries."""

    groups: PrefixGroups
    tokens_G: np.ndarray
    tiles_G: np.ndarray


class Decided(NamedTuple):
    """A plan (None: share nothing), valid while the sequences, their query tokens and their first `num_decisive` blocks
    stay the same."""

    plan: CascadePlan | None
    num_decisive: int


T = TypeVar("T")


class CascadeNumbers(NamedTuple, Generic[T]):
    """Numbers of a step for the cascade kernel, int32: their sizes, their arrays or their tensors.

    item_U3: tile, first unit of keys, end of the units; each item writes one sum. program_start: as in `DecodeNumbers`.
    tile_W3: a sequence with the prefix, the first item, and the number of items that the tile's keys are split into.
    token_P: the tokens that read shared prefixes, tile by tile, padded with -1 after each group. list_index_T: index of
    a token in that list, or -1. shared_S: the number of a sequence's context tokens covered by such sums.
    """

    item_U3: T
    program_start: T
    tile_W3: T
    token_P: T
    list_index_T: T
    shared_S: T


@dataclass(frozen=True)
class CascadeShape:
    """Sizes of the cascade kernel's work.

    num_queries: query tokens per tile, with one row for each query head of a KV head. There is one program per
    multiprocessor, because the sums of a tile fill its registers. max_tokens, max_tiles: limits per step.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    num_programs: int
    num_queries: int
    min_saved_bytes: int
    max_tokens: int
    max_tiles: int

    @classmethod
    def for_steps(
        cls, max_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, target: CompileTarget
    ) -> "CascadeShape":
        """Return the shape for steps of up to `max_tokens` tokens: twice the tiles that they fill, if their sums fit
        into `MAX_SUM_BYTES`."""
        group = num_heads // num_kv_heads
        num_queries = rows_of(head_dim) // group
        num_programs = max(1, target.num_multiprocessors // num_kv_heads)
        tile_sum_bytes = num_queries * num_heads * head_dim * _SUM_BYTES
        return cls(
            num_kv_heads=num_kv_heads,
            group=group,
            head_dim=head_dim,
            num_programs=num_programs,
            num_queries=num_queries,
            min_saved_bytes=MIN_SAVED_BYTES * target.num_multiprocessors,
            max_tokens=max_tokens,
            max_tiles=max(1, min(2 * -(-max_tokens // num_queries), MAX_SUM_BYTES // tile_sum_bytes - num_programs)),
        )

    @property
    def sizes(self) -> CascadeNumbers[int]:
        """Sizes of the flat tensors. There are no more sequences than tokens."""
        return CascadeNumbers(
            item_U3=3 * (self.max_tiles + self.num_programs),
            program_start=self.num_programs + 1,
            tile_W3=3 * self.max_tiles,
            token_P=self.max_tiles * self.num_queries,
            list_index_T=self.max_tokens,
            shared_S=self.max_tokens,
        )

    def decide(self, attn_metadata: AttentionInput, sequences: np.ndarray) -> Decided:
        """Choose the groups worth sharing among the sequences at these indices; no plan if they save too little."""
        count_S = (attn_metadata.query_start_S1[1:] - attn_metadata.query_start_S1[:-1]).astype(np.int64)[sequences]

        def readings(groups: PrefixGroups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Return the tokens of the prefix, the queries and the tiles of each group."""
            queries_G = np.add.reduceat(count_S.take(groups.sequence_I), groups.start_G1[:-1])
            return (
                groups.blocks_G * attn_metadata.block_size // UNIT * UNIT,
                queries_G,
                -(-queries_G // self.num_queries),
            )

        def saved_bytes(groups: PrefixGroups) -> np.ndarray:
            """Return the prefix bytes that are not read again, minus those of sums (written and read) and queries, for
            each piece that a tile's keys may be split into."""
            tokens_G, queries_G, tiles_G = readings(groups)
            saved_reads_G = groups.size_G - tiles_G
            pieces_G = np.minimum(tokens_G // UNIT, 1 + self.num_programs / tiles_G)
            row_bytes = 2 * _SUM_BYTES * (self.head_dim + 2) + _VALUE_BYTES * self.head_dim
            read_G = saved_reads_G * tokens_G * (2 * _VALUE_BYTES * self.head_dim)
            return self.num_kv_heads * (read_G - queries_G * self.group * row_bytes * pieces_G)

        # The prefix excludes the keys of a step's queries, so each sequence keeps something to read.
        before_S = attn_metadata.context_len_S[sequences] - count_S
        table_SM = attn_metadata.block_table_SM
        if len(sequences) < len(table_SM):
            table_SM = table_SM[sequences]
        groups = prefix_groups(table_SM, before_S // attn_metadata.block_size, saved_bytes)
        nothing = Decided(None, groups.num_decisive)
        if not len(groups.blocks_G):
            return nothing
        saved_G = saved_bytes(groups)
        best_first = np.argsort(-saved_G, kind="stable")
        fits_G = np.zeros(len(saved_G), dtype=bool)
        fits_G[best_first] = np.cumsum(readings(groups)[2][best_first]) <= self.max_tiles
        if not fits_G.any() or saved_G[fits_G].sum() < self.min_saved_bytes:
            return nothing
        groups = groups.select(fits_G)
        tokens_G, _, tiles_G = readings(groups)
        groups = PrefixGroups(sequences.take(groups.sequence_I), groups.start_G1, groups.blocks_G, groups.num_decisive)
        return Decided(CascadePlan(groups, tokens_G, tiles_G), groups.num_decisive)

    def numbers(self, attn_metadata: AttentionInput, plan: CascadePlan | None) -> CascadeNumbers[np.ndarray]:
        """Return the numbers of a step. plan: None, if nothing is shared."""
        list_index_T = np.full(int(attn_metadata.query_start_S1[-1]), -1)
        shared_S = np.zeros(len(attn_metadata.context_len_S), dtype=np.int64)
        nothing = np.zeros(0, dtype=np.int64)
        if plan is None:
            return CascadeNumbers(
                item_U3=nothing,
                program_start=np.zeros(self.num_programs + 1, np.int64),
                tile_W3=nothing,
                token_P=nothing,
                list_index_T=list_index_T,
                shared_S=shared_S,
            )
        sequence_I, group_I, start_G = plan.groups.sequence_I, plan.groups.group_I, plan.groups.start_G1[:-1]
        shared_S[sequence_I] = plan.tokens_G[group_I]
        first_I = attn_metadata.query_start_S1[sequence_I].astype(np.int64)
        count_I = attn_metadata.query_start_S1[sequence_I + 1] - first_I
        token_Q = np.repeat(first_I - np.cumsum(count_I) + count_I, count_I) + np.arange(int(count_I.sum()))
        padding_G = plan.tiles_G * self.num_queries - np.add.reduceat(count_I, start_G)
        index_Q = np.arange(len(token_Q)) + np.repeat((np.cumsum(padding_G) - padding_G)[group_I], count_I)
        list_index_T[token_Q] = index_Q
        token_P = np.full(int(plan.tiles_G.sum()) * self.num_queries, -1)
        token_P[index_Q] = token_Q
        units_W = np.repeat(plan.tokens_G // UNIT, plan.tiles_G)
        items = partition(np.zeros_like(units_W), units_W, self.num_programs)
        first_item_W = np.cumsum(items.pieces_S) - items.pieces_S
        sequence_W = np.repeat(sequence_I[start_G], plan.tiles_G)
        return CascadeNumbers(
            item_U3=np.stack([items.of_I, items.begin_I, items.end_I], axis=1),
            program_start=items.program_start,
            tile_W3=np.stack([sequence_W, first_item_W, items.pieces_S], axis=1),
            token_P=token_P,
            list_index_T=list_index_T,
            shared_S=shared_S,
        )


@dataclass(frozen=True)
class CascadeMetadata:
    """Device tensors of fixed size: the numbers of a step, and the float32 sums that the kernels write."""

    shape: CascadeShape
    numbers: CascadeNumbers[torch.Tensor]
    partial_UKRD: torch.Tensor  # float32, like the maxima and sums of its rows
    best_UKR: torch.Tensor
    sum_UKR: torch.Tensor

    @classmethod
    def for_steps(cls, shape: CascadeShape, tensors: Iterable[torch.Tensor]) -> "CascadeMetadata":
        """Build the metadata on flat tensors of the shape's `sizes`."""
        numbers = CascadeNumbers(*tensors)
        rows = shape.max_tiles + shape.num_programs, shape.num_kv_heads, shape.num_queries * shape.group
        partial_UKRD, best_UKR, sum_UKR = (
            torch.empty(*rows, *columns, dtype=torch.float32, device=numbers.item_U3.device)
            for columns in ((shape.head_dim,), (), ())
        )
        numbers = numbers._replace(item_U3=numbers.item_U3.view(-1, 3), tile_W3=numbers.tile_W3.view(-1, 3))
        return cls(shape, numbers, partial_UKRD, best_UKR, sum_UKR)

    @property
    def sums_of_tokens(self) -> tuple[torch.Tensor, ...]:
        """Arguments by which the decode kernel finds the sums of a token."""
        numbers = self.numbers
        return (
            numbers.shared_S,
            numbers.list_index_T,
            numbers.tile_W3,
            self.partial_UKRD,
            self.best_UKR,
            self.sum_UKR,
        )


class CascadeSteps:
    """Caches the last plan for steps in which the decode kernel computes all sequences."""

    def __init__(self, shape: CascadeShape) -> None:
        self._shape = shape
        self._numbers: CascadeNumbers[np.ndarray] | None = None
        self._num_decisive = 0
        self._query_start_S1 = np.zeros(0, dtype=np.int32)
        self._first_SD = np.zeros((0, 0), dtype=np.int32)  # each sequence's decisive blocks,
        self._usable_S = np.zeros(0, dtype=np.int32)  # and the number of them that can be shared

    def numbers(self, attn_metadata: AttentionInput) -> CascadeNumbers[np.ndarray]:
        """Return `CascadeShape.numbers` of the plan among all sequences. The caller must not modify the arrays."""
        if self._numbers is None or not self._is_valid(attn_metadata):
            decided = self._shape.decide(attn_metadata, np.arange(len(attn_metadata.context_len_S)))
            self._num_decisive, self._query_start_S1 = decided.num_decisive, attn_metadata.query_start_S1.copy()
            self._first_SD, self._usable_S = self._decisive_blocks(attn_metadata)
            self._first_SD = self._first_SD.copy()
            self._numbers = self._shape.numbers(attn_metadata, decided.plan)
        return self._numbers

    def numbers_among(self, attn_metadata: AttentionInput, sequences: np.ndarray) -> CascadeNumbers[np.ndarray]:
        """Return the same for the sequences at these indices, without the cache."""
        return self._shape.numbers(attn_metadata, self._shape.decide(attn_metadata, sequences).plan)

    def _is_valid(self, attn_metadata: AttentionInput) -> bool:
        if not np.array_equal(attn_metadata.query_start_S1, self._query_start_S1):
            return False
        first_SD, usable_S = self._decisive_blocks(attn_metadata)
        return np.array_equal(usable_S, self._usable_S) and np.array_equal(first_SD, self._first_SD)

    def _decisive_blocks(self, attn_metadata: AttentionInput) -> tuple[np.ndarray, np.ndarray]:
        count_S = attn_metadata.query_start_S1[1:] - attn_metadata.query_start_S1[:-1]
        before_S = attn_metadata.context_len_S - count_S
        usable_S = np.minimum(before_S // attn_metadata.block_size, self._num_decisive)
        return attn_metadata.block_table_SM[:, : self._num_decisive], usable_S
