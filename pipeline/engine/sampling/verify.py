"""Verification of drafts against the model's tokens.

Suffixes: R rows of a step with drafts, S its sequences.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.engine.sampling.batch import SamplerOutput


@dataclass(frozen=True)
class Verified:
    """Result of a step with drafts. Sequence s has the rows from first_S[s] up to the next one's: one for each of its
    drafts and one after them. Its first num_accepted_S[s] drafts are accepted, and its next tokens are those of its
    first num_accepted_S[s] + 1 rows; only the last of these may be non-finite."""

    output: SamplerOutput
    first_S: np.ndarray
    num_accepted_S: np.ndarray


def verify(output: SamplerOutput, draft_R: np.ndarray) -> Verified:
    """Return how many drafts of each sequence the model accepts, and the resulting tokens.

    Row r is computed from the known tokens and the drafts before it, and draft_R[r] (int64) is the token drafted for
    its position; -1 marks the last row of each sequence, which has no draft.

    Each row has the token that it would have in a plain step, and a draft is accepted if it equals that token. So the
    tokens are those of plain steps, sampled ones too: a draft x is accepted with probability p(x), which is the maximum
    for a draft of unknown distribution. If drafts were sampled from a known distribution, `output` contains them where
    rejection sampling accepts them; then the tokens have the same distribution but depend on the drafts.
    """
    differs = np.flatnonzero((output.token_ids != draft_R) | ~output.finite)
    first_S = np.flatnonzero(draft_R < 0) + 1
    first_S[1:], first_S[0] = first_S[:-1].copy(), 0
    return Verified(output, first_S, differs[np.searchsorted(differs, first_S)] - first_S)
