"""Whether drafted tokens are those that the model gives.

Suffixes: R rows of a step with drafts, S its sequences, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch
from pipeline.engine.sampling.on_device import Chooser, Drawn, draw_on_device
from pipeline.engine.sampling.on_host import greedy, sample
from pipeline.engine.sampling.penalties import LateIds
from pipeline.engine.sampling.rejection import DraftLaw
from pipeline.kernels.transfer import on_device


@dataclass(frozen=True)
class Verified:
    """What a step with drafts came to. Sequence s has the rows from first_S[s] to those of the next one: one for each
    of its drafts and one behind them. Its first num_accepted_S[s] drafts were confirmed, and its next tokens are those
    of its first num_accepted_S[s] + 1 rows; only the last of these may be not finite."""

    output: SamplerOutput
    first_S: np.ndarray
    num_accepted_S: np.ndarray

    @property
    def num_rounds(self) -> int:
        """The most tokens that a sequence gets."""
        return int(self.num_accepted_S.max()) + 1

    def tokens(self, sequences: np.ndarray, number: int) -> SamplerOutput:
        """Their tokens number `number`, from 0, in the form that a plain step gives them."""
        return self.output.of_rows(self.first_S[sequences] + number)


@dataclass(frozen=True)
class Checked:
    """The same, being worked out by a device that the host does not wait for. accepted_S is there."""

    drawn: Drawn
    first_S: np.ndarray
    draft_S: np.ndarray
    accepted_S: torch.Tensor

    def verified(self) -> Verified:
        """On the host; waits for it."""
        return Verified(self.drawn.output(), self.first_S, self.drawn.besides())


def verify(
    logits_RV: torch.Tensor,
    batch: SamplingBatch | None,
    draft_R: np.ndarray,
    law: DraftLaw | None = None,
) -> Verified:
    """How many drafts of each sequence the model confirms, and the tokens that this makes.

    Row r is computed from the known tokens and the drafts before it, and draft_R[r] (int64) is what was drafted for its
    place; -1 marks the last row of each sequence, for whose place nothing was. `batch` None: every row is greedy and
    wants nothing else.

    Each row takes the token that it would take in a plain step, and a draft is accepted where it is that token. So the
    tokens are those of plain steps, drawn ones too: a draft x is accepted with probability p(x), the most that is
    possible for a draft whose law is not known. Only where the law of the drafts is given, rejection sampling accepts
    more of them; then the tokens have the same law, but depend on the drafts.
    """
    output = greedy(logits_RV) if batch is None else sample(logits_RV, batch, law)
    differs = np.flatnonzero((output.token_ids != draft_R) | ~output.finite)
    first_S = np.flatnonzero(draft_R < 0) + 1
    first_S[1:], first_S[0] = first_S[:-1].copy(), 0
    return Verified(output, first_S, differs[np.searchsorted(differs, first_S)] - first_S)


@torch.inference_mode()
def check_on_device(
    chooser: Chooser,
    logits_RV: torch.Tensor,
    batch: SamplingBatch | None,
    draft_S: np.ndarray,
    draft_id_R: torch.Tensor,
    law: DraftLaw | None = None,
    late: LateIds | None = None,
) -> Checked:
    """Begin what `verify` does. draft_S: drafts of each sequence, 0 too; draft_id_R: on the device, as `verify` has
    them. late: see `draw_on_device`."""
    first_S = np.cumsum(draft_S + 1) - draft_S - 1

    def accepted(token_R: torch.Tensor, finite_R: torch.Tensor) -> torch.Tensor:
        stands_R = (token_R == draft_id_R) & finite_R
        row_SK1 = first_S[:, None] + np.minimum(np.arange(int(draft_S.max()) + 1), draft_S[:, None])
        return stands_R[on_device(row_SK1, stands_R.device)].cumprod(dim=1).sum(dim=1)  # the last of each never stands

    drawn = draw_on_device(chooser, logits_RV, batch, late, law, besides=accepted)
    assert drawn.besides_S is not None
    return Checked(drawn, first_S, draft_S, drawn.besides_S)
