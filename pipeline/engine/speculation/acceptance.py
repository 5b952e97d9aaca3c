"""How many tokens a step with drafts gives, by what became of drafts in recent steps. No torch.

Of drafts that were computed, and of those that were replayed. Sequences without any count as ones whose first fell.
"""

import numpy as np

HALF, REPLAY_HALF = 0.97, 0.5  # what earlier steps, or replays, count for after another one
DEEPER = 0.9  # a place that nobody drafted in: the one before it by so much


class Acceptance:
    """Of one proposer. K: places of drafts."""

    def __init__(self, most: int) -> None:
        self._place_K = np.arange(1, most + 1)
        self._tried_K, self._accepted_K = np.zeros(most), np.zeros(most)
        self._tokens_K: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        return self._tried_K[0] > 0.0

    def observe(self, drafted_N: np.ndarray, accepted_N: np.ndarray, num_without: int) -> None:
        """One step. num_without: sequences that had no drafts."""
        self._add(drafted_N, accepted_N, np.ones(len(drafted_N)), HALF)
        self._tried_K[0] += num_without

    def replayed(self, slot_O: np.ndarray, accepted_O: np.ndarray) -> None:
        """Offers of some sequences (see drafts/replay.py). A sequence whose drafts fall has more of them in as many
        tokens; in a step each sequence has one."""
        self._add(np.full(len(slot_O), len(self._place_K)), accepted_O, 1.0 / np.bincount(slot_O)[slot_O], REPLAY_HALF)

    def _add(self, drafted_N: np.ndarray, accepted_N: np.ndarray, weight_N: np.ndarray, memory: float) -> None:
        reached_NK = accepted_N[:, None] >= self._place_K
        tried_NK = (drafted_N[:, None] >= self._place_K) & (accepted_N[:, None] >= self._place_K - 1)
        self._tried_K = memory * self._tried_K + weight_N @ tried_NK
        self._accepted_K = memory * self._accepted_K + weight_N @ reached_NK
        self._tokens_K = None

    @property
    def tokens(self) -> float:
        """That a sequence gets in a step."""
        return float(self._after_each()[-1])

    def speed(self, cost: float) -> float:
        """Times as fast as plain steps at the best depth. cost: of a draft, in plain steps."""
        return float((self._after_each() / (1.0 + cost * self._place_K)).max())

    def _after_each(self) -> np.ndarray:
        """Tokens of a sequence that drafts up to each place."""
        if self._tokens_K is None:
            places = list(zip(self._tried_K.tolist(), self._accepted_K.tolist()))
            last = reach = places[0][1] / max(places[0][0], 1.0)
            tokens = [1.0 + reach]
            for tried, accepted in places[1:]:
                last = min((accepted + DEEPER * last) / (tried + 1.0), 1.0)
                reach *= last
                tokens.append(tokens[-1] + reach)
            self._tokens_K = np.array(tokens)
        return self._tokens_K
