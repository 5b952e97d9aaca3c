"""A step whose tokens the device is still drawing while the host plans the next one.

Where the device works beside the host (a GPU), the host need not wait for a step's tokens to plan the step after it: it
knows who gets one, and that is all that a plan needs. So the engine keeps one step in flight:

    plan n+1 with promised tokens -> launch n+1, its late tokens copied on the device -> read the tokens of n -> ends

A step with drafts gives a sequence from one token to one more than its drafts, and which it is only the device knows.
Then n+1 is planned for the most, in places and in blocks, and the device moves each sequence back by as many tokens as
it fell short of that (`Shortfall`): positions, contexts, and where keys and values are written.

A sequence that turns out to have ended with its token of n has been computed once too often; its row of n+1 is thrown
away. What that row wrote lies behind the sequence's last token, in blocks that nobody reads before they are written
again: the device works in the order of the launches.

Suffixes: K sequences of the step in flight, S sequences of the next step, T its tokens, L its late tokens, W ways in
which a sequence can fall short.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.on_device import Drawn
from pipeline.engine.sampling.penalties import LateIds
from pipeline.engine.sampling.verify import Checked, Verified
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import StepInput, StepPlan, runs
from pipeline.kernels.transfer import on_device


@dataclass(frozen=True)
class Shortfall:
    """How many tokens each sequence of a step is behind its plan, which only the device knows: at most `most`."""

    short_S: torch.Tensor  # int64
    most: int
    sequence_T: np.ndarray  # int64: of each token of the step
    slot_mapping_TW: np.ndarray  # int64: where the token's key and value go when its sequence is w tokens behind

    def put_into(self, numbers_3T: torch.Tensor) -> None:
        """Correct the positions and the slots of a step, behind its token ids."""
        device, num_tokens = numbers_3T.device, len(self.sequence_T)
        short_T = self.short_S[on_device(self.sequence_T, device)]
        numbers_3T[1, :num_tokens] -= short_T
        numbers_3T[2, :num_tokens] = on_device(self.slot_mapping_TW, device).gather(1, short_T[:, None])[:, 0]


@dataclass(frozen=True)
class LateTokens:
    """Tokens of a step that only the device knows: its token place_L[i], places ascending, is row row_L[i] of
    token_ids_R."""

    place_L: np.ndarray
    row_L: np.ndarray
    token_ids_R: torch.Tensor
    shortfall: Shortfall | None = None  # where steps before had drafts

    def put_into(self, numbers_3T: torch.Tensor) -> None:
        """Into the token ids, positions and slots of the step, as the plan has them."""
        device = numbers_3T.device
        numbers_3T[0, on_device(self.place_L, device)] = self.token_ids_R[on_device(self.row_L, device)]
        if self.shortfall is not None:
            self.shortfall.put_into(numbers_3T)

    def ids(self, step: StepInput) -> LateIds:
        """The same tokens by the rows of their own step that see them: those of their sequence that do not lie before.

        Not where sequences may have fallen short.
        """
        assert self.shortfall is None
        sequence_R = np.searchsorted(step.query_start_S1, step.logit_row_R, side="right") - 1
        first_R = np.searchsorted(self.place_L, step.query_start_S1[sequence_R])
        count_R = np.searchsorted(self.place_L, step.logit_row_R, side="right") - first_R
        late_ids_L = self.token_ids_R[on_device(self.row_L, self.token_ids_R.device)]
        seen = on_device(runs(first_R, count_R), late_ids_L.device)
        return LateIds(np.repeat(np.arange(len(count_R)), count_R), late_ids_L[seen])

    def sequences(self, plan: StepPlan) -> np.ndarray:
        """Of which sequence of the step each is."""
        return np.searchsorted(np.cumsum(plan.count_S), self.place_L, side="right")

    def with_drafts(self, place_D: np.ndarray, row_D: np.ndarray, token_ids_N: torch.Tensor) -> "LateTokens":
        """These and others, whose places are not among them."""
        place = np.concatenate([self.place_L, place_D])
        row = np.concatenate([self.row_L, row_D + len(self.token_ids_R)])
        order = np.argsort(place, kind="stable")
        return replace(
            self, place_L=place[order], row_L=row[order], token_ids_R=torch.cat([self.token_ids_R, token_ids_N])
        )


@dataclass(frozen=True)
class Flight:
    """The sequences of a step that are still there, and what is being drawn for them.

    Sequence slot_K[i] has the rows of what is drawn from row_K[i] on: as many as it has drafts, and one.
    """

    slot_K: np.ndarray
    row_K: np.ndarray
    draft_K: np.ndarray
    drawn: Drawn | Checked
    kept_S: np.ndarray  # bool: which they are of all that get tokens in the step
    last_id_K: np.ndarray  # the last token of each that was known before

    @classmethod
    def of(cls, slot_S: np.ndarray, drawn: Drawn | Checked, table: SlotTable, running: np.ndarray) -> "Flight":
        kept_S = np.isin(slot_S, running)
        slot_K = slot_S[kept_S]
        first_S = drawn.first_S if isinstance(drawn, Checked) else np.arange(len(slot_S))
        draft_S = drawn.draft_S if isinstance(drawn, Checked) else np.zeros(len(slot_S), dtype=np.int64)
        last_id_K = table.token_ids[slot_K, table.num_known[slot_K] - 1].astype(np.int64)
        return cls(slot_K, first_S[kept_S], draft_S[kept_S], drawn, kept_S, last_id_K)

    @property
    def has_drafts(self) -> bool:
        return isinstance(self.drawn, Checked)

    def late(self, plan: StepPlan, table: SlotTable) -> LateTokens | None:
        """The tokens of `plan`, which was made with promised tokens, that are drawn here: the last known one of each
        sequence that was promised any, and, where a draft model computes it, the one before; None where there are none.
        """
        of_S, query_start_S = self._of(plan.slot_S, table), np.cumsum(plan.count_S) - plan.count_S
        known_S = plan.count_S if plan.draft_S is None else plan.count_S - plan.draft_S
        late_S = np.flatnonzero((of_S >= 0) & (plan.known_end_S == table.num_known[plan.slot_S]))
        if not len(late_S):
            return None
        of_L, place_L = of_S[late_S], query_start_S[late_S] + known_S[late_S] - 1
        if not isinstance(self.drawn, Checked):
            return LateTokens(place_L, self.row_K[of_L], self.drawn.token_ids_R)
        accepted_K, token_R = self._accepted_K(), self.drawn.drawn.token_ids_R
        row_K = on_device(self.row_K, token_R.device) + accepted_K
        last_id_K = on_device(self.last_id_K, token_R.device)
        before_K = torch.where(accepted_K > 0, token_R[(row_K - 1).clamp_(min=0)], last_id_K)
        two = np.flatnonzero((self.draft_K[of_L] > 0) & (known_S[late_S] > 1))
        late = LateTokens(place_L, of_L, token_R[row_K], self.shortfall(plan, table))
        return late.with_drafts(place_L[two] - 1, of_L[two], before_K)

    def shortfall(self, plan: StepPlan, table: SlotTable) -> Shortfall | None:
        """How far the sequences of a plan are behind it by the drafts of this step that fall; None: nobody can be."""
        of_S = self._of(plan.slot_S, table)
        most = int(np.where(of_S >= 0, self.draft_K[of_S], 0).max(initial=0))
        if not isinstance(self.drawn, Checked) or most == 0:
            return None
        accepted_K = self._accepted_K()
        short_K1 = torch.nn.functional.pad(on_device(self.draft_K, accepted_K.device) - accepted_K, (0, 1))
        size = table.block_size
        sequence_T = np.repeat(np.arange(len(plan.slot_S)), plan.count_S)
        position_TW = np.maximum(runs(plan.start_S, plan.count_S)[:, None] - np.arange(most + 1), 0)
        block_TW = table.block_table[plan.slot_S[sequence_T][:, None], position_TW // size].astype(np.int64)
        return Shortfall(
            short_K1[on_device(of_S, accepted_K.device)], most, sequence_T, block_TW * size + position_TW % size
        )

    def output(self) -> SamplerOutput | Verified:
        """What was drawn for the sequences that are left; waits for the device."""
        if isinstance(self.drawn, Checked):
            verified = self.drawn.verified()
            return Verified(verified.output, self.row_K, verified.num_accepted_S[self.kept_S])
        return self.drawn.output().of_rows(self.row_K)

    def _accepted_K(self) -> torch.Tensor:
        assert isinstance(self.drawn, Checked)
        return self.drawn.accepted_S[on_device(np.flatnonzero(self.kept_S), self.drawn.accepted_S.device)]

    def _of(self, slot_S: np.ndarray, table: SlotTable) -> np.ndarray:
        """Which sequence here each of these is; -1: none."""
        of_slot = np.full(table.num_slots, -1, dtype=np.int64)
        of_slot[self.slot_K] = np.arange(len(self.slot_K))
        return of_slot[slot_S]
