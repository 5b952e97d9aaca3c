"""What a step's tokens and time were spent on. Integers only, so that sums are exact."""

from dataclasses import dataclass

import numpy as np

from pipeline.engine.params import DRAFT_PLACES, EngineStats
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import StepPlan

_DRAFTED, _ACCEPTED = ([f"{what}_{place}" for place in range(1, DRAFT_PLACES + 1)] for what in ("drafted", "accepted"))


@dataclass(frozen=True)
class StepTokens:
    """Tokens of one step by what they are: prompt, generated, or computed before and lost by a preemption."""

    prefill: int
    decode: int
    repeated: int


def classify(plan: StepPlan, table: SlotTable) -> StepTokens:
    """Must be called before the plan's counters are advanced."""
    lost_S, num_tokens = table.repeat_until[plan.slot_S], plan.num_tokens
    fresh_S = np.maximum(table.num_prompt[plan.slot_S], lost_S)
    behind = np.flatnonzero(plan.start_S < fresh_S)  # the others only generate
    if not len(behind):
        return StepTokens(0, num_tokens, 0)
    start_B, lost_B = plan.start_S[behind], lost_S[behind]
    end_B = start_B + plan.count_S[behind]
    prompt_B = table.num_prompt[plan.slot_S[behind]]
    repeated = int(np.maximum(np.minimum(end_B, lost_B) - start_B, 0).sum())
    prefill = int(np.maximum(np.minimum(end_B, prompt_B) - np.maximum(start_B, lost_B), 0).sum())
    return StepTokens(prefill, num_tokens - repeated - prefill, repeated)


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
    counts = vars(stats)
    for names, count_S in ((_DRAFTED, drafted_S), (_ACCEPTED, accepted_S)):
        for name, count in zip(names, _by_place(count_S)):
            counts[name] += count


def _by_place(count_S: np.ndarray) -> list[int]:
    """How many drafts are in each place; the last place stands for all from there on."""
    deep = np.bincount(count_S)[::-1].cumsum()[::-1][1:].tolist()
    return [*deep[: DRAFT_PLACES - 1], sum(deep[DRAFT_PLACES - 1 :])][: len(deep)]
