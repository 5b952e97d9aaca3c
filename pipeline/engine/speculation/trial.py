"""Drafts on trial: some steps whose outcome says whether they pay, and not what is expected of them. No torch.

What is expected of drafts rests on a table of costs that was made at start-up, and a step with drafts in a row of such
takes less than a single one. So where a gain is possible, it is tried, for as long as luck may take. After each trial
that failed the pause until the next one is longer.
"""

STEPS = 32  # at most, and fewer
SEQUENCES = 128  # where so many of them get tokens in fewer,
LEAST_STEPS = 8  # but not fewer than these
FIRST_STEPS = 4  # before them, that say nothing: proposers catch up, and nothing is in the nearest caches
NOT_BEFORE = 256  # steps: at the start little is known from which to draft
FIRST_PAUSE = 512  # steps, doubled by each that failed,
MOST_PAUSE = 8192  # up to this
GAIN = 0.05  # that has to be seen


class Trial:
    """One after the other, of one proposer."""

    def __init__(self) -> None:
        self._left = self._first = 0
        self._next_at = NOT_BEFORE
        self._pause = FIRST_PAUSE
        self._value_s = self._spent_s = 0.0
        self.num_failures = 0  # since one has paid

    @property
    def is_on(self) -> bool:
        return self._left > 0

    def may_begin(self, step: int) -> bool:
        """In step number `step`."""
        return not self.is_on and step >= self._next_at

    def begin(self, num_sequences: int) -> None:
        """Of steps of about so many sequences."""
        steps = min(max(SEQUENCES // num_sequences, LEAST_STEPS), STEPS)
        self._left, self._first, self._value_s, self._spent_s = steps, FIRST_STEPS, 0.0, 0.0

    def observe(self, value_s: float, spent_s: float) -> None:
        """A step of it took so long, with proposing, and plain ones would have taken value_s for its tokens."""
        if self._first:
            self._first -= 1
            return
        self._value_s += value_s
        self._spent_s += spent_s
        self._left -= 1

    def ends(self, step: int) -> bool:
        """It is over, or nothing can be drafted any more; whether drafts have paid."""
        has_paid = self._value_s > (1.0 + GAIN) * self._spent_s
        self._left = 0
        self.num_failures = 0 if has_paid else self.num_failures + 1
        self._pause = FIRST_PAUSE if has_paid else min(2 * self._pause, MOST_PAUSE)
        self._next_at = step + self._pause
        return has_paid
