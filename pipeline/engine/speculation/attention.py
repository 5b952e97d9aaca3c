"""How often steps are looked at while nobody drafts: what looking takes is a small share of the time. No torch.

A step of a small model takes little longer than the host's sums about it. So these are timed, and the pause until the
next step that is looked at is as long as it takes to earn them. The first looks may cost more, since nothing is known
yet.
"""

import math

SHARE = 0.004  # of the time; half of it after drafts failed on trial, a third after they failed again
GRANT_STEPS = 8.0  # plain steps' time at the start, and what is kept at most
HASTE = 4.0  # how many times as often steps are looked at while that lasts
LEAST_PAUSE = 8  # steps
MOST_PAUSE = 256  # steps, whatever looking took: it may have been the machine


class Attention:
    """An account in seconds."""

    def __init__(self) -> None:
        self._balance_s: float | None = None

    def pause(self, elapsed_s: float, spent_s: float, plain_s: float, num_failures: int = 0) -> int:
        """Steps until the next one to look at. elapsed_s: since the last one, of which `spent_s` was looking; plain_s:
        of a step at present."""
        share = SHARE / (1 + num_failures)
        most_s, earned_s = GRANT_STEPS * plain_s, share * plain_s
        balance_s = most_s if self._balance_s is None else self._balance_s
        balance_s = min(balance_s + share * elapsed_s, most_s) - spent_s
        self._balance_s = max(balance_s, -MOST_PAUSE * earned_s)
        overdue_s = -self._balance_s if self._balance_s < 0.0 else spent_s / HASTE
        return max(math.ceil(overdue_s / earned_s), LEAST_PAUSE)
