"""One step as data: the scheduler's decision (`StepPlan`) and the arrays that a model computes it from (`StepInput`).

There is one operation: a sequence has known tokens and computed tokens, and a step computes some of the difference,
plus drafts, which may become known. Suffixes: S sequences of the step, T tokens of the step, R rows of logits: a
sequence whose last known token is computed has one row for that token and one for each of its drafts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.engine.schedule.slot_table import SlotTable, ranges
from pipeline.engine.stats import EngineStats
from pipeline.kernels.shared_prefix import cut_rows


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step: sequence slot_S[s] computes count_S[s] tokens from position start_S[s] on. Pure data.

    They are known tokens except the last draft_S[s], which are drafts.
    """

    slot_S: np.ndarray  # int64
    start_S: np.ndarray  # int64
    count_S: np.ndarray  # int64
    samples_S: np.ndarray  # bool: all known tokens will be computed, so a next token is sampled
    draft_S: np.ndarray | None = None  # int64, above 0 only where samples_S; None: no drafts

    @cached_property
    def num_tokens(self) -> int:
        return int(self.count_S.sum())

    @property
    def known_end_S(self) -> np.ndarray:
        """Position after the last known token that each sequence computes."""
        end_S = self.start_S + self.count_S
        return end_S if self.draft_S is None else end_S - self.draft_S

    @cached_property
    def sampling_slot_S(self) -> np.ndarray:
        """Slots of the sequences that sample a token, in the order of their rows of logits."""
        return self.slot_S[self.samples_S]


class StepTokens(NamedTuple):
    """Tokens of one step by kind: prompt tokens, generated ones, those recomputed after a preemption, known ones after
    the prompt of a row that generates nothing (labels), and those of texts that are read to compare models."""

    prefill: int
    decode: int
    repeated: int
    labels: int = 0
    compared: int = 0

    @classmethod
    def from_plan(
        cls,
        plan: StepPlan,
        prompt_S: np.ndarray,
        lost_S: np.ndarray,
        generates_S: np.ndarray | None = None,
        compared_S: np.ndarray | None = None,
    ) -> "StepTokens":
        """Classify the tokens of a plan. prompt_S: length of each prompt. lost_S: tokens computed before a preemption.
        generates_S: which sequences generate; default all. compared_S: which are read to compare models; default
        none."""
        if compared_S is not None and compared_S.any():
            assert generates_S is not None
            rest = np.flatnonzero(~compared_S)
            drafts_S = None if plan.draft_S is None else plan.draft_S[rest]
            others = StepPlan(plan.slot_S[rest], plan.start_S[rest], plan.count_S[rest], plan.samples_S[rest], drafts_S)
            tokens = cls.from_plan(others, prompt_S[rest], lost_S[rest], generates_S[rest])
            return tokens._replace(compared=plan.num_tokens - others.num_tokens)
        first_S = np.maximum(prompt_S, lost_S)  # where decoding begins
        labels = 0
        if generates_S is not None:
            labels = int(np.maximum(plan.known_end_S - np.maximum(plan.start_S, first_S), 0)[~generates_S].sum())
        (prefilling,) = np.nonzero(plan.start_S < first_S)  # the others only decode
        if not len(prefilling):
            return cls(0, plan.num_tokens - labels, 0, labels)
        start_P, prompt_P, lost_P = plan.start_S[prefilling], prompt_S[prefilling], lost_S[prefilling]
        end_P = start_P + plan.count_S[prefilling]
        repeated = int(np.maximum(np.minimum(end_P, lost_P) - start_P, 0).sum())
        prefill = int(np.maximum(np.minimum(end_P, prompt_P) - np.maximum(start_P, lost_P), 0).sum())
        return cls(prefill, plan.num_tokens - repeated - prefill - labels, repeated, labels)

    def add_time(self, stats: EngineStats, step_us: int, only_samples: bool, num_rejected: int = 0) -> None:
        """Add the step's time to `stats`, split in proportion to these numbers. only_samples: the step computed one
        token per sequence, without drafts or readers. num_rejected: decoded drafts that the model rejected."""
        total = max(sum(self), 1)
        prefill_us, preempted_us = step_us * (self.prefill + self.labels) // total, step_us * self.repeated // total
        drafts_us = step_us * min(num_rejected, self.decode) // total
        quality_us = step_us * self.compared // total
        stats.prefill_us += prefill_us
        stats.quality_us += quality_us
        stats.preempted_us += preempted_us
        stats.drafts_us += drafts_us
        stats.decode_us += step_us - prefill_us - preempted_us - drafts_us - quality_us
        if self.decode == total and only_samples:
            stats.plain_steps += 1
            stats.plain_rows += total
            stats.plain_rows_squared += total * total
            stats.plain_us += step_us
            stats.plain_rows_us += total * step_us


@dataclass(frozen=True)
class StepInput:
    """Host arrays of a step; token t belongs to the sequence s with query_start[s] <= t < query_start[s + 1]."""

    token_id_T: np.ndarray  # int64
    position_T: np.ndarray  # int64
    slot_mapping_T: np.ndarray  # int64: block * block_size + offset
    query_start_S1: np.ndarray  # int32
    context_len_S: np.ndarray  # int32: tokens up to and including this step's
    block_table_SM: np.ndarray  # int32
    logit_row_R: np.ndarray  # int64: tokens of the step whose logits are computed
    adapter_S: np.ndarray | None = None  # int64: index of each sequence's adapter, -1: none; None: no sequence has one
    # the same for layers that keep only the last tokens; None: there are none
    window_slot_mapping_T: np.ndarray | None = None
    window_block_table_SM: np.ndarray | None = None
    state_slot_S: np.ndarray | None = None  # int64: where each sequence's states are; None: the model has none

    @property
    def slot_mappings(self) -> list[np.ndarray]:
        """The slots of each token: in the layers that keep all tokens, and in the others if there are any."""
        window = self.window_slot_mapping_T
        return [self.slot_mapping_T] if window is None else [self.slot_mapping_T, window]


def build_input(plan: StepPlan, table: SlotTable) -> StepInput:
    """Gather a plan's arrays without a loop over sequences."""
    size, slot_S, count_S = table.pages.block_size, plan.slot_S, plan.count_S
    context_len_S = plan.start_S + count_S
    query_start_S1 = np.zeros(len(slot_S) + 1, dtype=np.int64)
    query_end_S = np.cumsum(count_S, out=query_start_S1[1:])
    max_blocks = -(-int(context_len_S.max()) // size)
    slot_T = np.repeat(slot_S, count_S)
    position_T = np.repeat(context_len_S - query_end_S, count_S)
    position_T += np.arange(len(position_T))
    number_T = position_T // size

    def slot_mapping(block_table: np.ndarray) -> np.ndarray:
        block_T = block_table.take(slot_T * block_table.shape[1] + number_T).astype(np.int64)
        return (block_T - number_T) * size + position_T

    windowed = table.window_block_table
    logit_row_R = query_end_S[plan.samples_S] - 1
    if plan.draft_S is not None:
        logit_row_R = ranges(logit_row_R - plan.draft_S[plan.samples_S], plan.draft_S[plan.samples_S] + 1)
    adapter_S = table.adapter[slot_S] if table.adapter_index else None
    return StepInput(
        token_id_T=table.token_ids.take(slot_T * table.max_model_len + position_T).astype(np.int64),
        position_T=position_T,
        slot_mapping_T=slot_mapping(table.block_table),
        query_start_S1=query_start_S1.astype(np.int32),
        context_len_S=context_len_S.astype(np.int32),
        block_table_SM=cut_rows(table.block_table, slot_S, 0, max_blocks),
        logit_row_R=logit_row_R,
        adapter_S=adapter_S if adapter_S is not None and (adapter_S >= 0).any() else None,
        window_slot_mapping_T=None if windowed is None else slot_mapping(windowed),
        window_block_table_SM=None if windowed is None else cut_rows(windowed, slot_S, 0, max_blocks),
        state_slot_S=slot_S if table.has_states else None,
    )


def dummy_step(
    *, count_S: np.ndarray, context_len_S: np.ndarray, block_table_SM: np.ndarray, block_size: int, row_R: np.ndarray
) -> StepInput:
    """Build a step without real sequences, which computes the last `count_S` tokens (token id 1) of each context and
    the logits of its tokens `row_R`. All use the first state."""
    position_T = ranges(context_len_S - count_S, count_S)
    sequence_T = np.repeat(np.arange(len(count_S)), count_S)
    block_T = block_table_SM[sequence_T, position_T // block_size].astype(np.int64)
    return StepInput(
        token_id_T=np.ones(len(position_T), dtype=np.int64),
        position_T=position_T,
        slot_mapping_T=block_T * block_size + position_T % block_size,
        query_start_S1=np.append(0, np.cumsum(count_S)).astype(np.int32),
        context_len_S=context_len_S.astype(np.int32),
        block_table_SM=block_table_SM,
        logit_row_R=row_R,
        state_slot_S=np.zeros_like(count_S),
    )
