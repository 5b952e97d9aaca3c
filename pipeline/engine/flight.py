"""A step whose tokens the device is still drawing while the host plans the next one.

Where the device works beside the host (a GPU), the host need not wait for a step's tokens to plan the step after it: it
knows who gets one, and that is all that a plan needs. So the engine keeps one step in flight:

    plan n+1 with promised tokens -> launch n+1, its late tokens copied on the device -> read the tokens of n -> ends

A sequence that turns out to have ended with its token of n has been computed once too often; its row of n+1 is thrown
away. What that row wrote lies behind the sequence's last token, in blocks that nobody reads before they are written
again: the device works in the order of the launches.

Suffixes: R rows of the step in flight that get a token, S sequences of the next step, L its late tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.drawn import Drawn
from pipeline.engine.penalties import LateIds
from pipeline.engine.sampling_batch import SamplerOutput
from pipeline.engine.step import StepPlan
from pipeline.kernels.transfer import on_device


@dataclass(frozen=True)
class LateTokens:
    """Tokens of a step that only the device knows: its token place_L[i] is row row_L[i] of token_ids_R."""

    place_L: np.ndarray
    row_L: np.ndarray
    token_ids_R: torch.Tensor

    def put_into(self, token_ids_T: torch.Tensor) -> None:
        device = token_ids_T.device
        token_ids_T[on_device(self.place_L, device)] = self.token_ids_R[on_device(self.row_L, device)]

    def ids(self, logit_row_R: np.ndarray) -> LateIds:
        """The same tokens by the rows of their own step that follow them: each is its sequence's last one."""
        late_ids_L = self.token_ids_R[on_device(self.row_L, self.token_ids_R.device)]
        return LateIds(np.searchsorted(logit_row_R, self.place_L), late_ids_L)


@dataclass(frozen=True)
class Flight:
    """The rows of a step whose sequences are still there, and what is being drawn for them. slot_K[i] gets what is
    drawn for row row_K[i]."""

    slot_K: np.ndarray
    row_K: np.ndarray
    drawn: Drawn

    @classmethod
    def of(cls, slot_R: np.ndarray, drawn: Drawn, running: np.ndarray) -> "Flight":
        row_K = np.flatnonzero(np.isin(slot_R, running))
        return cls(slot_R[row_K], row_K, drawn)

    def late(self, plan: StepPlan, promised_P: np.ndarray, num_slots: int) -> LateTokens:
        """The tokens of `plan` that are drawn here: of each promised sequence the only one it computes."""
        row_of_slot = np.full(num_slots, -1, dtype=np.int64)
        row_of_slot[self.slot_K] = self.row_K
        is_promised = np.zeros(num_slots, dtype=bool)
        is_promised[promised_P] = True
        late_S = np.flatnonzero(is_promised[plan.slot_S])
        assert (plan.count_S[late_S] == 1).all(), "what a promised sequence knew before has been computed"
        place_S = np.cumsum(plan.count_S) - plan.count_S
        return LateTokens(place_S[late_S], row_of_slot[plan.slot_S[late_S]], self.drawn.token_ids_R)

    def output(self) -> SamplerOutput:
        """What was drawn for the rows that are left; waits for the device."""
        return self.drawn.output().of_rows(self.row_K)
