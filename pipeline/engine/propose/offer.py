"""What a proposer has to offer. No torch.

Shapes: S sequences, K most drafts of one.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Offer:
    """Sequence slot_S[s] could be drafted up to count_S[s] tokens.

    match_len_S: on what grounds, more are better: how many of its last tokens occurred before, or symbols of them (see
    templates.py), where the drafts are what followed then; or 1 and what was accepted of its last drafts; 0 where
    nothing is known or offered.

    token_id_SK: the tokens, where looking them up is all there is to drafting them; else it has no columns.
    """

    slot_S: np.ndarray  # int64
    count_S: np.ndarray  # int64
    match_len_S: np.ndarray  # int64
    token_id_SK: np.ndarray  # int64
