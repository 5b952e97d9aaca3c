"""What a proposer had to offer lately. No torch.

C: classes (`Acceptance`), K: draft positions.
"""

from dataclasses import dataclass

import numpy as np

SHARE_STEPS = 16  # steps over which the shares of candidates are remembered


@dataclass
class Lately:
    """How many candidates a proposer had lately, and when its drafts or offers were last compared with tokens."""

    hoped_CK: np.ndarray  # shares as they could be at best
    share_CK: np.ndarray  # of the sequences in such a step: those in class c with a candidate at k
    present: float = 1.0  # share of the steps in which anybody had a candidate
    num_seen: int = 0
    num_present: int = 0
    seen_at: int = 0

    def remember(self, deep_CK: np.ndarray, num_sequences: int, num_steps: int = 1) -> None:
        """So many sequences came as deep, in one step; or in some, each counted as often as it was in one."""
        is_present = bool(deep_CK.any())
        self.num_seen = min(self.num_seen + num_steps, SHARE_STEPS)
        self.present += (is_present - self.present) * min(num_steps / self.num_seen, 1.0)
        if is_present:
            self.num_present = min(self.num_present + num_steps, SHARE_STEPS)
            kept = 1.0 - min(num_steps / self.num_present, 1.0)
            self.share_CK = kept * self.share_CK + (1.0 - kept) * deep_CK / num_sequences
