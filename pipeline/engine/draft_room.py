"""Room for drafts in a step that is planned: tokens, places in the context, and KV blocks. No torch.

Drafts come after everything else (see scheduler.py): into the tokens that a full step leaves and into free blocks.
Nobody is preempted for them.
"""

import numpy as np

from pipeline.engine.scheduler import Scheduler
from pipeline.engine.step import StepPlan, share


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
        size = pool.block_size
        count_S = share(count_S, scheduler.step_tokens - plan.num_tokens)
        held_S, known_S = table.num_blocks[slot_S], table.num_known[slot_S]
        missing_S = np.where(count_S > 0, (known_S + count_S + (size - 1)) // size - held_S, 0)
        if missing_S.max(initial=0) > 0:
            granted_S = share(np.maximum(missing_S, 0), pool.num_free)
            count_S = np.where(count_S > 0, np.minimum(count_S, (held_S + granted_S) * size - known_S), 0)
            grown = np.flatnonzero(granted_S)
            if len(grown):
                table.append_blocks(slot_S[grown], granted_S[grown], pool.allocate(int(granted_S.sum())))
        return count_S

    def place(self, plan: StepPlan, sampling: np.ndarray, token_id_SK: np.ndarray, count_S: np.ndarray) -> StepPlan:
        """The plan with the first count_S[s] tokens of token_id_SK[s], which were granted, as drafts of the sequence at
        place sampling[s] of the plan."""
        table, slot_S = self._scheduler.table, plan.slot_S[sampling]
        row_D, column_D = np.nonzero(np.arange(token_id_SK.shape[1]) < count_S[:, None])
        slot_D = slot_S[row_D]
        table.token_ids[slot_D, table.num_known[slot_D] + column_D] = token_id_SK[row_D, column_D]
        draft_S = np.zeros_like(plan.count_S)
        draft_S[sampling] = count_S
        return StepPlan(plan.slot_S, plan.start_S, plan.count_S + draft_S, plan.samples_S, draft_S)
