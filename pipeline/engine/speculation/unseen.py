"""How long the steps take that nobody looks at. No torch.

A step that is looked at takes longer: the looking has thrown what it needs out of the nearest caches. What plain steps
take is what they take in a row, so it is the time from the beginning of one to that of another further on, by the
number of steps between them.
"""

FIRST_STEPS = 3  # behind another kind of step, which are slower as well
LEAST_STEPS = 4  # in a row behind those


class UnseenSteps:
    """The last steps in a row that were alike: of as many sequences, each computing one token."""

    def __init__(self) -> None:
        self._num_sequences = 0
        self._since_ns = self._until_ns = 0
        self._num_steps = 0
        self._step_s: float | None = None
        self._were = 0  # sequences of the steps that it is of

    def begins(self, num_sequences: int, num_tokens: int, now_ns: int) -> None:
        """A step of so many tokens begins."""
        if num_tokens == num_sequences == self._num_sequences:
            self._num_steps += 1
            if self._num_steps <= FIRST_STEPS:
                self._since_ns = now_ns
            self._until_ns = now_ns
            return
        self.ends()
        self._num_sequences = num_sequences if num_tokens == num_sequences else 0

    def ends(self) -> None:
        """The next step is unlike them. The last one is left out: rows may have come or gone in it."""
        timed = self._num_steps - FIRST_STEPS
        if timed >= LEAST_STEPS:
            self._step_s = (self._until_ns - self._since_ns) / timed / 1e9
            self._were = self._num_sequences
        self._num_sequences = self._num_steps = 0

    def step_s(self, num_sequences: int) -> float | None:
        """Seconds of each of the last steps in a row, where they were of so many sequences; None where they were not,
        were too few, or have been asked for before."""
        step_s, self._step_s = self._step_s, None
        return step_s if num_sequences == self._were else None
