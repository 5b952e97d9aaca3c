"""One step as data: what the scheduler decided (`StepPlan`) and the arrays a model computes it from (`StepInput`).

There is one operation: a sequence has known tokens and computed tokens, and a step computes some of the difference,
with drafts also tokens that may come to be known. S sequences of the step, T tokens of the step, R rows that sample:
tokens of the step behind which another is wanted, namely the last known one of a sequence, where that is computed, and
its drafts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.engine.schedule.sequence import SlotTable
from pipeline.kernels.table_rows import cut_rows


@dataclass(frozen=True)
class StepPlan:
    """Sequence slot_S[s] computes count_S[s] tokens from position start_S[s] on. Pure data.

    They are known tokens but for the last draft_S[s], which are drafts.
    """

    slot_S: np.ndarray  # int64
    start_S: np.ndarray  # int64
    count_S: np.ndarray  # int64
    samples_S: np.ndarray  # bool: all known tokens will be computed, so the next one is drawn
    draft_S: np.ndarray | None = None  # int64, above 0 only where samples_S; None: nobody has drafts

    @cached_property
    def num_tokens(self) -> int:
        return int(self.count_S.sum())

    @property
    def known_end_S(self) -> np.ndarray:
        """The position behind the last known token that each computes."""
        if self.draft_S is None:
            return self.start_S + self.count_S
        return self.start_S + self.count_S - self.draft_S


@dataclass(frozen=True)
class StepInput:
    """Host arrays of a step; token t belongs to sequence s where query_start[s] <= t < query_start[s + 1]."""

    token_id_T: np.ndarray  # int64
    position_T: np.ndarray  # int64
    slot_mapping_T: np.ndarray  # int64: block * block_size + offset
    query_start_S1: np.ndarray  # int32
    context_len_S: np.ndarray  # int32: tokens up to and with this step's
    block_table_SM: np.ndarray  # int32
    logit_row_R: np.ndarray  # int64: tokens of the step whose logits are wanted


def build_input(plan: StepPlan, table: SlotTable) -> StepInput:
    """Gather a plan's arrays without a loop over sequences."""
    size, slot_S, count_S = table.block_size, plan.slot_S, plan.count_S
    context_len_S = plan.start_S + count_S
    query_start_S1 = np.zeros(len(slot_S) + 1, dtype=np.int64)
    query_end_S = np.cumsum(count_S, out=query_start_S1[1:])
    most_blocks = -(-int(context_len_S.max()) // size)
    slot_T = np.repeat(slot_S, count_S)
    position_T = np.repeat(context_len_S - query_end_S, count_S)
    position_T += np.arange(len(position_T))
    number_T = position_T // size
    block_T = table.block_table.take(slot_T * table.block_table.shape[1] + number_T).astype(np.int64)
    logit_row_R = query_end_S[plan.samples_S] - 1
    if plan.draft_S is not None:
        logit_row_R = runs(logit_row_R - plan.draft_S[plan.samples_S], plan.draft_S[plan.samples_S] + 1)
    return StepInput(
        token_id_T=table.token_ids.take(slot_T * table.max_model_len + position_T).astype(np.int64),
        position_T=position_T,
        slot_mapping_T=(block_T - number_T) * size + position_T,
        query_start_S1=query_start_S1.astype(np.int32),
        context_len_S=context_len_S.astype(np.int32),
        block_table_SM=cut_rows(table.block_table, slot_S, 0, most_blocks),
        logit_row_R=logit_row_R,
    )


def made_input(
    num_tokens: int,
    num_sequences: int,
    context_len: int,
    block_size: int,
    max_len: int,
    num_rows: int,
    num_blocks: int = 0,
) -> StepInput:
    """A step of no real sequences, to see what one costs: each has up to `context_len` tokens behind it and computes
    its share of `num_tokens`, the first `num_rows` of which want logits. They read and write blocks from block 0 on,
    `num_blocks` of them, one sequence after the other, and those again that are there; or as many as one sequence needs
    where these are more. Each has an order of its own: attention reads together what several begin with."""
    count_S = np.full(num_sequences, num_tokens // num_sequences, dtype=np.int64)
    count_S[: num_tokens % num_sequences] += 1
    query_start_S1 = np.append(0, np.cumsum(count_S))
    offset_T = np.arange(num_tokens) - np.repeat(query_start_S1[:-1], count_S)
    position_T = np.minimum(context_len + offset_T, max_len - 1)
    most_blocks = -(-int(position_T.max() + 1) // block_size)
    in_order_SM = np.tile(np.arange(most_blocks, dtype=np.int32), (num_sequences, 1))
    first_S1 = np.arange(num_sequences, dtype=np.int32)[:, None] * most_blocks
    table_SM = np.random.default_rng(0).permuted(in_order_SM, axis=1) + first_S1
    table_SM %= max(num_blocks, most_blocks)
    block_T = table_SM[np.repeat(np.arange(num_sequences), count_S), position_T // block_size].astype(np.int64)
    return StepInput(
        token_id_T=np.ones(num_tokens, dtype=np.int64),
        position_T=position_T,
        slot_mapping_T=block_T * block_size + position_T % block_size,
        query_start_S1=query_start_S1.astype(np.int32),
        context_len_S=np.minimum(context_len + count_S, max_len).astype(np.int32),
        block_table_SM=table_SM,
        logit_row_R=np.arange(num_rows),
    )


def runs(first_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
    """first_N[0], first_N[0] + 1, ..., count_N[0] of them, then those of first_N[1], and so on."""
    if len(first_N) == 1:  # often, and in a fifth of the time
        return np.arange(first_N[0], first_N[0] + count_N[0])
    end_N = np.cumsum(count_N)
    return np.arange(int(end_N[-1]) if len(end_N) else 0) + np.repeat(first_N - end_N + count_N, count_N)


def share(wanted_S: np.ndarray, available: int) -> np.ndarray:
    """`available` dealt out, as much as each wants, the first ones first."""
    before_S = np.cumsum(wanted_S) - wanted_S
    return np.minimum(np.maximum(available - before_S, 0), wanted_S)
