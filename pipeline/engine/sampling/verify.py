"""Which drafted tokens are those that the model gives.

Suffixes: R rows of a step with drafts, S its sequences.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.engine.sampling.batch import SamplerOutput


@dataclass(frozen=True)
class Verified:
    """What a step with drafts came to. Sequence s has the rows from first_S[s] to those of the next one: one for each
    of its drafts and one after them. Its first num_accepted_S[s] drafts are accepted, and its next tokens are those of
    its first num_accepted_S[s] + 1 rows; only the last of these may be not finite."""

    output: SamplerOutput
    first_S: np.ndarray
    num_accepted_S: np.ndarray


def verify(output: SamplerOutput, draft_R: np.ndarray) -> Verified:
    """Return how many drafts of each sequence the model accepts, and the tokens that this makes.

    Row r is computed from the known tokens and the drafts before it, and draft_R[r] (int64) is what was drafted for its
    place; -1 marks the last row of each sequence, for whose place nothing was.

    Each row has the token that it would have in a plain step, and a draft is accepted where it is that token. So the
    tokens are those of plain steps, sampled ones too: a draft x is accepted with probability p(x), the most that is
    possible for a draft of unknown distribution. Where drafts were sampled from a known distribution, `output` has them
    where rejection sampling accepts them; then the tokens have the same distribution, but depend on the drafts.
    """
    differs = np.flatnonzero((output.token_ids != draft_R) | ~output.finite)
    first_S = np.flatnonzero(draft_R < 0) + 1
    first_S[1:], first_S[0] = first_S[:-1].copy(), 0
    return Verified(output, first_S, differs[np.searchsorted(differs, first_S)] - first_S)
