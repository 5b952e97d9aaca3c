"""What drafts gain on average in the steps in which somebody is asked for them. No torch."""

STEPS = 16  # over which it is averaged
NOTABLE = 0.25  # change of what lasts of the differences between sequences: what tokens are worth has changed by then


class MeanGain:
    """Running means of what steps are worth, in plain steps' time, and of what they take."""

    def __init__(self, at_first: float) -> None:
        """at_first: the gain that is believed before any step."""
        self._at_first = at_first
        self._value_s = self._spent_s = 0.0
        self._num_steps, self._lasting = 0, 0.0

    @property
    def now(self) -> float:
        """Of time, above 0 where drafts gain."""
        return self._value_s / self._spent_s - 1.0 if self._spent_s else self._at_first

    def clear(self) -> None:
        """The next step is the first one."""
        self._value_s = self._spent_s = 0.0

    def add(self, value_s: float, spent_s: float, lasting: float) -> None:
        """A step. lasting: the share of the differences between sequences that counts in value_s; once it is another
        one, what was averaged before counts little."""
        if not self._spent_s:
            self._value_s, self._spent_s, self._num_steps = (1.0 + self._at_first) * spent_s, spent_s, STEPS
            self._lasting = lasting
        elif abs(lasting - self._lasting) > NOTABLE:
            self._num_steps, self._lasting = 1, lasting
        self._num_steps = min(self._num_steps + 1, STEPS)
        self._value_s += (value_s - self._value_s) / self._num_steps
        self._spent_s += (spent_s - self._spent_s) / self._num_steps
