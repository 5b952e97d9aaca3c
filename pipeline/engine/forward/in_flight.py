"""A step whose tokens the device is still sampling, and the tokens of the next step that only the device knows.

The next step is launched with placeholders for the tokens in flight; the device copies the tokens in (`FutureTokens`).
A step with drafts is never in flight, because the number of its tokens decides what the next one computes.

Suffixes: K sequences of the step in flight, P those of them with a placeholder, S sequences of the next step, F its
future tokens, one per sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.on_device import PendingOutput
from pipeline.engine.sampling.penalties import FutureIds
from pipeline.engine.schedule.slot_table import PLACEHOLDER_TOKEN, SlotTable
from pipeline.engine.schedule.step_plan import StepInput, StepPlan
from pipeline.kernels.memory import on_device


@dataclass(frozen=True)
class FutureTokens:
    """Tokens of a step that only the device knows: the step's token token_index_F[i] (ascending) is row row_F[i] of
    token_ids_R."""

    token_index_F: np.ndarray
    row_F: np.ndarray
    token_ids_R: torch.Tensor

    @property
    def index_2F(self) -> np.ndarray:
        """Return token_index_F and row_F, for `put_into`."""
        return np.stack([self.token_index_F, self.row_F])

    def put_into(self, token_ids_T: torch.Tensor, index_2F: torch.Tensor) -> None:
        """Write the tokens into the token ids of the step. index_2F: `index_2F` on the device."""
        token_ids_T.index_copy_(0, index_2F[0], self.token_ids_R[index_2F[1]])

    def ids(self, step: StepInput) -> FutureIds:
        """Return the same tokens by the rows of logits after them: each is the last token of its sequence."""
        row_F = on_device(self.row_F, self.token_ids_R.device)
        return FutureIds(np.searchsorted(step.logit_row_R, self.token_index_F), self.token_ids_R[row_F])


@dataclass(frozen=True)
class StepInFlight:
    """Running sequences of the step in flight and their pending tokens: sequence slot_K[i] has row row_K[i] of the
    logits."""

    slot_K: np.ndarray
    row_K: np.ndarray
    pending: PendingOutput

    @classmethod
    def from_pending(cls, slot_S: np.ndarray, pending: PendingOutput, running: np.ndarray) -> "StepInFlight":
        row_K = np.flatnonzero(np.isin(slot_S, running))
        return cls(slot_S[row_K], row_K, pending)

    def future_tokens(self, plan: StepPlan, table: SlotTable) -> FutureTokens | None:
        """Return the tokens that `plan`, made with placeholders, needs from this step: the last known token of each
        sequence with a placeholder. None if there are none."""
        index_of_slot = np.full(table.num_slots, -1, dtype=np.int64)
        index_of_slot[self.slot_K] = np.arange(len(self.slot_K))
        index_S = index_of_slot[plan.slot_S]
        future_S = np.flatnonzero((index_S >= 0) & (plan.known_end_S == table.num_known[plan.slot_S]))
        if not len(future_S):
            return None
        token_index_F = np.cumsum(plan.count_S)[future_S] - 1
        return FutureTokens(token_index_F, self.row_K[index_S[future_S]], self.pending.token_ids_R)

    def output(self) -> SamplerOutput:
        """Return the sampled tokens of the sequences that still run; waits for the device."""
        return self.pending.output().of_rows(self.row_K)


class Placeholders:
    """Tokens in flight that count as known in the table, so that the next step can be planned and launched before they
    arrive.

    Sequences that reach their maximum length with the token in flight get no placeholder.
    """

    def __init__(self, table: SlotTable, in_flight: StepInFlight | None) -> None:
        self._table = table
        slot_K = np.zeros(0, dtype=np.int64) if in_flight is None else in_flight.slot_K
        self._slot_P = slot_K[table.num_known[slot_K] + 1 < table.limit[slot_K]]
        table.token_ids[self._slot_P, table.num_known[self._slot_P]] = PLACEHOLDER_TOKEN
        table.num_known[self._slot_P] += 1
        self._is_withdrawn = False

    def withdraw(self) -> None:
        """Undo the placeholders. Must be called before the tokens are appended; idempotent."""
        if not self._is_withdrawn:
            self._is_withdrawn = True
            self._table.num_known[self._slot_P] -= 1

    def rebase(self, plan: StepPlan, running: np.ndarray) -> StepPlan:
        """Return `plan`, made with these placeholders, without the sequences that have ended since."""
        kept = np.flatnonzero(np.isin(plan.slot_S, running))
        return StepPlan(plan.slot_S[kept], plan.start_S[kept], plan.count_S[kept], plan.samples_S[kept])
