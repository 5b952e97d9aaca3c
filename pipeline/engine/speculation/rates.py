"""How fast each sequence goes with drafts, and how long all of them take together. No torch.

S: sequences of a step.
"""

from collections.abc import Iterator

import numpy as np

RATE_STEPS = 100  # drafted steps over which a sequence's rate is averaged
FIRST_STEPS = 6  # drafted steps before differences are believed at all
ALIKE_STEPS = 3.0  # steps in a row of one sequence say as much as one that stands alone: texts come in stretches
MOST_GROUPS = 6  # of sequences that are taken for equally fast


class Rates:
    """Tokens that a sequence gets in a drafted step, on average, by slot; and how much of the differences is chance."""

    def __init__(self) -> None:
        self._rate, self._num_seen = np.zeros(0), np.zeros(0)
        self._scatter, self._num_steps = 0.0, 0.0  # mean square of a sequence's tokens around its own rate

    def add(self, slot_S: np.ndarray, tokens_S: np.ndarray) -> None:
        """These sequences got so many tokens in a step."""
        self._reach(slot_S)
        away_S, seen_S = tokens_S - self._rate[slot_S], np.minimum(self._num_seen[slot_S] + 1, RATE_STEPS)
        again = seen_S > 1
        if again.any():
            self._num_steps = min(self._num_steps + 1, RATE_STEPS)
            scatter = float((away_S[again] ** 2 * (1.0 - 1.0 / seen_S[again])).mean())
            self._scatter += (scatter - self._scatter) / self._num_steps
        self._rate[slot_S] += away_S / seen_S
        self._num_seen[slot_S] = seen_S

    def slowing(self, slot_S: np.ndarray, mean: float) -> Iterator[tuple[float, int]]:
        """Rates from the fastest sequences' on, and how many sequences are as slow as that or slower.

        They are the rates seen, drawn together by the share of their variance that chance explains (James and Stein),
        and moved so that their mean is `mean`; where none was seen it is everybody's.
        """
        self._reach(slot_S)
        left, num_seen_S = len(slot_S), self._num_seen[slot_S]
        known = num_seen_S > 0
        rate_S = np.full(left, mean)
        if known.sum() > 1 and self._num_steps >= FIRST_STEPS:
            seen = self._rate[slot_S][known]
            chance = ALIKE_STEPS * self._scatter * float((1.0 / num_seen_S[known]).mean())
            kept = max(1.0 - chance / max(float(seen.var(ddof=1)), 1e-9), 0.0)
            more_S = np.full(left, seen.mean() - 1.0)
            more_S[known] += kept * (seen - seen.mean())
            more_S = more_S.clip(0.0)
            if more_S.any():
                rate_S = 1.0 + more_S * (mean - 1.0) / more_S.mean()
        for group in np.array_split(np.sort(rate_S)[::-1], min(MOST_GROUPS, left)):
            yield float(group.mean()), left
            left -= len(group)

    def _reach(self, slot_S: np.ndarray) -> None:
        missing = int(slot_S.max(initial=0)) + 1 - len(self._rate)
        if missing > 0:
            self._rate, self._num_seen = (np.append(each, np.zeros(missing)) for each in (self._rate, self._num_seen))
