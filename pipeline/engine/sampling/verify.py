"""Whether drafted tokens are those that the model gives.

Suffixes: R rows of a step with drafts, S its sequences, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch
from pipeline.engine.sampling.on_device import PendingOutput, SamplingKernels, tokens_on_device
from pipeline.engine.sampling.on_host import sample
from pipeline.engine.sampling.penalties import FutureIds
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.kernels.memory import on_device, to_host


@dataclass(frozen=True)
class Verified:
    """What a step with drafts came to. Sequence s has the rows from first_S[s] to those of the next one: one for each
    of its drafts and one after them. Its first num_accepted_S[s] drafts are accepted, and its next tokens are those of
    its first num_accepted_S[s] + 1 rows; only the last of these may be not finite."""

    output: SamplerOutput
    first_S: np.ndarray
    num_accepted_S: np.ndarray


@dataclass(frozen=True)
class PendingVerified:
    """A `Verified` that the device is working on. accepted_S can be used on the device at once; host_accepted_S is
    right when the tokens are there."""

    tokens: PendingOutput
    first_S: np.ndarray
    draft_S: np.ndarray
    accepted_S: torch.Tensor
    host_accepted_S: torch.Tensor

    def output(self) -> Verified:
        """On the host; waits for it."""
        return Verified(self.tokens.output(), self.first_S, self.host_accepted_S.numpy())


def verify(
    logits_RV: torch.Tensor,
    batch: SamplingBatch | None,
    draft_R: np.ndarray,
    proposal: ProposalDistribution | None = None,
) -> Verified:
    """How many drafts of each sequence the model accepts, and the tokens that this makes.

    Row r is computed from the known tokens and the drafts before it, and draft_R[r] (int64) is what was drafted for its
    place; -1 marks the last row of each sequence, for whose place nothing was. `batch` None: every row is greedy and
    wants nothing else.

    Each row takes the token that it would take in a plain step, and a draft is accepted where it is that token. So the
    tokens are those of plain steps, sampled ones too: a draft x is accepted with probability p(x), the most that is
    possible for a draft of unknown distribution. Where the distribution is given (proposal), rejection sampling accepts
    more of them; then the tokens have the same distribution, but depend on the drafts.
    """
    output = sample(logits_RV, batch, proposal)
    differs = np.flatnonzero((output.token_ids != draft_R) | ~output.finite)
    first_S = np.flatnonzero(draft_R < 0) + 1
    first_S[1:], first_S[0] = first_S[:-1].copy(), 0
    return Verified(output, first_S, differs[np.searchsorted(differs, first_S)] - first_S)


@torch.inference_mode()
def verify_on_device(
    kernels: SamplingKernels,
    logits_RV: torch.Tensor,
    batch: SamplingBatch | None,
    draft_S: np.ndarray,
    draft_id_R: torch.Tensor,
    proposal: ProposalDistribution | None = None,
    future: FutureIds | None = None,
) -> PendingVerified:
    """Begin what `verify` does. draft_S: drafts of each sequence, 0 too; draft_id_R: on the device, as `verify` has
    them. future: see `sample_on_device`."""
    first_S = np.cumsum(draft_S + 1) - draft_S - 1
    token_and_finite_2R, logprobs = tokens_on_device(kernels, logits_RV, batch, future, proposal)
    accepted_R = (token_and_finite_2R[0] == draft_id_R) & token_and_finite_2R[1].bool()
    row_SK1 = first_S[:, None] + np.minimum(np.arange(int(draft_S.max()) + 1), draft_S[:, None])
    # The last row of each sequence has no draft and is never accepted.
    accepted_S = accepted_R[on_device(row_SK1, accepted_R.device)].cumprod(dim=1).sum(dim=1)
    host_accepted_S = to_host(accepted_S)  # before the tokens, which are waited for
    pending = PendingOutput(token_and_finite_2R, logprobs)
    return PendingVerified(pending, first_S, draft_S, accepted_S, host_accepted_S)
