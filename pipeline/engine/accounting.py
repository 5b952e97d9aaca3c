"""What a step's tokens and time were spent on. Integers only, so that sums are exact."""

from dataclasses import dataclass

import numpy as np

from pipeline.engine.params import DRAFT_PLACES, EngineStats
from pipeline.engine.sequence import SlotTable
from pipeline.engine.step import StepPlan


@dataclass(frozen=True)
class StepTokens:
    """Tokens of one step by what they are: prompt, generated, or computed before and lost by a preemption."""

    prefill: int
    decode: int
    repeated: int


def classify(plan: StepPlan, table: SlotTable) -> StepTokens:
    """Must be called before the plan's counters are advanced."""
    repeated, fresh_S = 0, plan.start_S
    lost_S = table.repeat_until.take(plan.slot_S)
    if lost_S.any():
        fresh_S = np.minimum(np.maximum(plan.start_S, lost_S), plan.start_S + plan.count_S)
        repeated = int((fresh_S - plan.start_S).sum())
    prompt_S = table.num_prompt.take(plan.slot_S)
    in_prompt = np.flatnonzero(fresh_S < prompt_S)
    end_P = (plan.start_S + plan.count_S)[in_prompt]
    prefill = int((np.minimum(end_P, prompt_S[in_prompt]) - fresh_S[in_prompt]).sum())
    return StepTokens(prefill, plan.num_tokens - repeated - prefill, repeated)


def record(stats: EngineStats, tokens: StepTokens, num_sequences: int, kv_used_ppm: int, step_us: int) -> None:
    """Add one step to `stats`; its time is split in proportion to its tokens."""
    total = tokens.prefill + tokens.decode + tokens.repeated
    prefill_us, repeated_us = step_us * tokens.prefill // total, step_us * tokens.repeated // total
    stats.num_steps += 1
    stats.prompt_tokens += tokens.prefill
    stats.recomputed_tokens += tokens.repeated
    stats.prefill_us += prefill_us
    stats.repeated_us += repeated_us
    stats.decode_us += step_us - prefill_us - repeated_us
    stats.batch_sum += num_sequences
    stats.kv_used_ppm_sum += kv_used_ppm


def record_drafts(stats: EngineStats, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
    """Add a step with drafts to `stats`: how many of each sequence's were computed, and how many of them accepted."""
    stats.num_draft_steps += 1
    for name, count_S in (("drafted", drafted_S), ("accepted", accepted_S)):
        for place, count in enumerate(_by_place(count_S), start=1):
            setattr(stats, f"{name}_{place}", getattr(stats, f"{name}_{place}") + count)


def _by_place(count_S: np.ndarray) -> list[int]:
    """How many drafts are in each place; the last place stands for all from there on."""
    deep = np.bincount(count_S)[::-1].cumsum()[::-1][1:].tolist()
    return [*deep[: DRAFT_PLACES - 1], sum(deep[DRAFT_PLACES - 1 :])][: len(deep)]
