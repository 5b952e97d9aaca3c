"""A step whose tokens the device is still sampling, and the tokens of the next step that only the device knows.

The next step is launched with placeholders where tokens in flight belong; the device copies the tokens in
(`FutureTokens`). A step with drafts gives a sequence from one token to one more than its drafts, and how many is known
on the device alone. Then the next step is planned for the most, in positions and in blocks, and the device moves each
sequence back by its rejected drafts (`RejectedDrafts`): positions, contexts, and where keys and values are written.

Suffixes: K sequences of the step in flight, S sequences of the next step, T its tokens, F its future tokens, W possible
numbers of rejected drafts.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.on_device import PendingOutput
from pipeline.engine.sampling.penalties import FutureIds
from pipeline.engine.sampling.verify import PendingVerified, Verified
from pipeline.engine.schedule.sequence import PLACEHOLDER_TOKEN, SlotTable, ranges
from pipeline.engine.schedule.step_plan import StepInput, StepPlan
from pipeline.kernels.memory import on_device


@dataclass(frozen=True)
class RejectedDrafts:
    """How many tokens each sequence of a step is behind its plan, which only the device knows: at most `most`."""

    count_S: torch.Tensor  # int64
    most: int
    sequence_T: np.ndarray  # int64: of each token of the step
    slot_mapping_TW: np.ndarray  # int64: where the token's key and value go when its sequence is w tokens behind

    def put_into(self, numbers_3T: torch.Tensor) -> None:
        """Correct the positions and the slots of a step, which follow its token ids."""
        device, num_tokens = numbers_3T.device, len(self.sequence_T)
        count_T = self.count_S[on_device(self.sequence_T, device)]
        numbers_3T[1, :num_tokens] -= count_T
        numbers_3T[2, :num_tokens] = on_device(self.slot_mapping_TW, device).gather(1, count_T[:, None])[:, 0]


@dataclass(frozen=True)
class FutureTokens:
    """Tokens of a step that only the device knows: its token place_F[i], places ascending, is row row_F[i] of
    token_ids_R."""

    place_F: np.ndarray
    row_F: np.ndarray
    token_ids_R: torch.Tensor
    rejected: RejectedDrafts | None = None  # where the step in flight has drafts

    @property
    def index_2F(self) -> np.ndarray:
        """place_F and row_F, for `put_into`."""
        return np.stack([self.place_F, self.row_F])

    def put_into(self, numbers_3T: torch.Tensor, index_2F: torch.Tensor) -> None:
        """Into the token ids, positions and slots of the step, as the plan has them. index_2F: `index_2F` on the
        device."""
        numbers_3T[0].index_copy_(0, index_2F[0], self.token_ids_R[index_2F[1]])
        if self.rejected is not None:
            self.rejected.put_into(numbers_3T)

    def ids(self, step: StepInput) -> FutureIds:
        """The same tokens by the rows of logits that see them: those of their sequence from their place on.

        Not where drafts may be rejected.
        """
        assert self.rejected is None
        sequence_R = np.searchsorted(step.query_start_S1, step.logit_row_R, side="right") - 1
        first_R = np.searchsorted(self.place_F, step.query_start_S1[sequence_R])
        count_R = np.searchsorted(self.place_F, step.logit_row_R, side="right") - first_R
        id_F = self.token_ids_R[on_device(self.row_F, self.token_ids_R.device)]
        seen = on_device(ranges(first_R, count_R), id_F.device)
        return FutureIds(np.repeat(np.arange(len(count_R)), count_R), id_F[seen])

    def sequences(self, plan: StepPlan) -> np.ndarray:
        """Of which sequence of the step each is."""
        return np.searchsorted(np.cumsum(plan.count_S), self.place_F, side="right")

    def with_drafts(self, place_D: np.ndarray, row_D: np.ndarray, token_ids_N: torch.Tensor) -> "FutureTokens":
        """These and others, whose places are not among them."""
        place = np.concatenate([self.place_F, place_D])
        row = np.concatenate([self.row_F, row_D + len(self.token_ids_R)])
        order = np.argsort(place, kind="stable")
        return replace(
            self, place_F=place[order], row_F=row[order], token_ids_R=torch.cat([self.token_ids_R, token_ids_N])
        )


@dataclass(frozen=True)
class StepInFlight:
    """The sequences of a step that still run, and what is being sampled for them.

    Sequence slot_K[i] has the rows of logits from row_K[i] on: as many as it has drafts, and one.
    """

    slot_K: np.ndarray
    row_K: np.ndarray
    draft_K: np.ndarray
    pending: PendingOutput | PendingVerified
    kept_S: np.ndarray  # bool: which they are of all that get tokens in the step
    last_id_K: np.ndarray  # the last known token of each

    @classmethod
    def of(
        cls, slot_S: np.ndarray, pending: PendingOutput | PendingVerified, table: SlotTable, running: np.ndarray
    ) -> "StepInFlight":
        kept_S = np.isin(slot_S, running)
        slot_K = slot_S[kept_S]
        first_S, draft_S = np.arange(len(slot_S)), np.zeros(len(slot_S), dtype=np.int64)
        if isinstance(pending, PendingVerified):
            first_S, draft_S = pending.first_S, pending.draft_S
        last_id_K = table.token_ids[slot_K, table.num_known[slot_K] - 1].astype(np.int64)
        return cls(slot_K, first_S[kept_S], draft_S[kept_S], pending, kept_S, last_id_K)

    @property
    def has_drafts(self) -> bool:
        return isinstance(self.pending, PendingVerified)

    def future_tokens(self, plan: StepPlan, table: SlotTable) -> FutureTokens | None:
        """The tokens of `plan`, which was made with placeholders, that are sampled here: the last known one of each
        sequence that has placeholders and, where a draft model computes it, the one before; None where there are none.
        """
        of_S, query_start_S = self._of(plan.slot_S, table), np.cumsum(plan.count_S) - plan.count_S
        known_S = plan.count_S if plan.draft_S is None else plan.count_S - plan.draft_S
        future_S = np.flatnonzero((of_S >= 0) & (plan.known_end_S == table.num_known[plan.slot_S]))
        if not len(future_S):
            return None
        of_F, place_F = of_S[future_S], query_start_S[future_S] + known_S[future_S] - 1
        if not isinstance(self.pending, PendingVerified):
            return FutureTokens(place_F, self.row_K[of_F], self.pending.token_ids_R)
        accepted_K, token_R = self._accepted_K(), self.pending.tokens.token_ids_R
        row_K = on_device(self.row_K, token_R.device) + accepted_K
        last_id_K = on_device(self.last_id_K, token_R.device)
        before_K = torch.where(accepted_K > 0, token_R[(row_K - 1).clamp_(min=0)], last_id_K)
        two = np.flatnonzero((self.draft_K[of_F] > 0) & (known_S[future_S] > 1))
        future = FutureTokens(place_F, of_F, token_R[row_K], self.rejected(plan, table))
        return future.with_drafts(place_F[two] - 1, of_F[two], before_K)

    def rejected(self, plan: StepPlan, table: SlotTable) -> RejectedDrafts | None:
        """How far the sequences of a plan are behind it by rejected drafts of this step; None: nobody can be."""
        of_S = self._of(plan.slot_S, table)
        most = int(np.where(of_S >= 0, self.draft_K[of_S], 0).max(initial=0))
        if most == 0:
            return None
        accepted_K = self._accepted_K()
        rejected_K1 = torch.nn.functional.pad(on_device(self.draft_K, accepted_K.device) - accepted_K, (0, 1))
        size = table.block_size
        sequence_T = np.repeat(np.arange(len(plan.slot_S)), plan.count_S)
        position_TW = np.maximum(ranges(plan.start_S, plan.count_S)[:, None] - np.arange(most + 1), 0)
        block_TW = table.block_table[plan.slot_S[sequence_T][:, None], position_TW // size].astype(np.int64)
        return RejectedDrafts(
            rejected_K1[on_device(of_S, accepted_K.device)], most, sequence_T, block_TW * size + position_TW % size
        )

    def output(self) -> SamplerOutput | Verified:
        """What was sampled for the sequences that are left; waits for the device."""
        output = self.pending.output()
        if isinstance(output, Verified):
            return Verified(output.output, self.row_K, output.num_accepted_S[self.kept_S])
        return output.of_rows(self.row_K)

    def _accepted_K(self) -> torch.Tensor:
        assert isinstance(self.pending, PendingVerified)
        return self.pending.accepted_S[on_device(np.flatnonzero(self.kept_S), self.pending.accepted_S.device)]

    def _of(self, slot_S: np.ndarray, table: SlotTable) -> np.ndarray:
        """Which sequence here each of these is; -1: none."""
        of_slot = np.full(table.num_slots, -1, dtype=np.int64)
        of_slot[self.slot_K] = np.arange(len(self.slot_K))
        return of_slot[slot_S]


class Placeholders:
    """Tokens in flight that count as known in the table, so that the next step can be planned and launched before them.

    In the end by their length, sequences do not go on: those get none.
    """

    def __init__(self, table: SlotTable, in_flight: StepInFlight | None) -> None:
        self._table, none = table, np.zeros(0, dtype=np.int64)
        self._slot_P, self._draft_P = (none, none) if in_flight is None else (in_flight.slot_K, in_flight.draft_K)
        goes_on = np.flatnonzero(table.num_known[self._slot_P] + 1 < table.limit[self._slot_P])
        self._slot_P, self._draft_P = self._slot_P[goes_on], self._draft_P[goes_on]
        first_P, count_P = table.num_known[self._slot_P], self._draft_P + 1
        table.token_ids[np.repeat(self._slot_P, count_P), ranges(first_P, count_P)] = PLACEHOLDER_TOKEN
        table.num_known[self._slot_P] += count_P
        table.num_computed[self._slot_P] += self._draft_P
        self._is_withdrawn = False

    def withdraw(self) -> None:
        """Count them no longer. Must come before the tokens are appended; again it does nothing."""
        if not self._is_withdrawn:
            self._is_withdrawn = True
            self._table.num_known[self._slot_P] -= self._draft_P + 1
            self._table.num_computed[self._slot_P] -= self._draft_P

    def rebase(self, plan: StepPlan, running: np.ndarray) -> StepPlan:
        """A plan that was made with these placeholders, once the tokens are known: without the sequences that have
        ended, the others from where they are."""
        here = np.flatnonzero(np.isin(plan.slot_S, running))
        slot_S, start_S = plan.slot_S[here], plan.start_S[here]
        start_S = np.where(np.isin(slot_S, self._slot_P), self._table.num_computed[slot_S], start_S)
        draft_S = None if plan.draft_S is None else plan.draft_S[here]
        return StepPlan(slot_S, start_S, plan.count_S[here], plan.samples_S[here], draft_S)
