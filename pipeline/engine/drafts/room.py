"""Room for drafts in a step that is planned: tokens, places in the context, and KV blocks. No torch.

Drafts come after everything else (see scheduler.py): into the tokens that a full step leaves and into free blocks.
Nobody is preempted for them.
"""

import numpy as np

from pipeline.engine.schedule.scheduler import Scheduler, allot
from pipeline.engine.schedule.sequence import ranges
from pipeline.engine.schedule.step_plan import StepPlan


class DraftRoom:
    """Of one engine's scheduler. `grant`, then the drafts are made, then `place`, before anything else is planned."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def most(self, slot_S: np.ndarray) -> np.ndarray:
        """How many drafts of each can be of use: with all of them accepted, one more token is generated."""
        table = self._scheduler.table
        return table.limit[slot_S] - table.num_known[slot_S] - 1

    def grant(self, plan: StepPlan, slot_S: np.ndarray, count_S: np.ndarray) -> np.ndarray:
        """How many drafts each of these sequences, all of which sample in the plan, may have of the count_S it wants:
        at most `most`, older ones first. Their blocks are allocated.

        None while steps are limited because one did not fit the memory.
        """
        scheduler = self._scheduler
        table, pool = scheduler.table, scheduler.pool
        if scheduler.step_tokens < scheduler.max_num_batched_tokens:
            return np.zeros_like(count_S)
        room = scheduler.step_tokens - plan.num_tokens
        if int(count_S.sum()) > room:
            count_S = allot(count_S, room)
        size, held_S, known_S = pool.block_size, table.num_blocks[slot_S], table.num_known[slot_S]
        missing_S = (known_S + count_S + (size - 1)) // size - held_S  # never of known tokens, which have their blocks
        if missing_S.max(initial=0) > 0:
            missing_S = np.maximum(missing_S, 0)
            if int(missing_S.sum()) > pool.num_free:
                missing_S = allot(missing_S, pool.num_free)
                count_S = np.minimum(count_S, (held_S + missing_S) * size - known_S)
            grown = np.flatnonzero(missing_S)
            if len(grown):
                table.append_blocks(slot_S[grown], missing_S[grown], pool.allocate(int(missing_S.sum())))
        return count_S

    def place(self, plan: StepPlan, sampling: np.ndarray, token_id_SK: np.ndarray, count_S: np.ndarray) -> StepPlan:
        """The plan with the first count_S[s] tokens of token_id_SK[s], which were granted, as drafts of the sequence at
        place sampling[s] of the plan."""
        table, slot_S = self._scheduler.table, plan.slot_S[sampling]
        place_D = ranges(table.num_known[slot_S], count_S)
        is_draft_SK = np.arange(token_id_SK.shape[1]) < count_S[:, None]
        table.token_ids[np.repeat(slot_S, count_S), place_D] = token_id_SK[is_draft_SK]
        draft_S = np.zeros_like(plan.count_S)
        draft_S[sampling] = count_S
        return StepPlan(plan.slot_S, plan.start_S, plan.count_S + draft_S, plan.samples_S, draft_S)
