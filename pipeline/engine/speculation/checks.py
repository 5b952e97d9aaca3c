"""Plain steps among drafted ones: when they are made to see what plain steps cost, and which of them say it. No torch.

Behind drafts or prompts a plain step takes longer than in a row of such, and one that is looked at takes longer than
one that is not: what it needs has been thrown out of the nearest caches. What drafts are to be compared with is what
plain steps take in the long run, so only some of them count.
"""

from pipeline.engine.speculation.messages import Outcome

SETTLED_STEPS = 3  # plain ones in a row, behind prompts or drafts, until they take what they take in the long run
UNSETTLED_STEPS = 768  # without such a one after which any plain step is better than none
FIRST_CHECK_STEPS = 4  # drafted steps before plain ones show what they cost beside them, doubled
CHECK_STEPS = 96  # by each, up to this
SURE_GAIN = 0.3  # with which what plain steps cost decides nothing, so that checks are left out
SURE_STEPS = 384  # until the last one was so many steps ago,
SURE_CHECKS = 3  # and not before so many, but for a gain of
SURE_AT_ONCE = 1.0
STALE_STEPS = 192  # without a timed row of steps that passed after which single ones count again


class PlainTimes:
    """Which plain steps say what plain steps cost, and when some are made for it. Steps have numbers that rise."""

    def __init__(self) -> None:
        self._in_a_row = 0  # without prompts
        self._timed_at = 0  # when one of these last counted
        self._unseen_at: int | None = None  # when a row of steps that passed was last timed
        self._since_check = 0  # drafted steps
        self._check_steps, self._num_checks = FIRST_CHECK_STEPS, 0
        self._to_come = 0  # plain steps of a check

    @property
    def is_due(self) -> bool:
        """While drafts are made: whether a check is."""
        return self._since_check >= self._check_steps

    def begin(self, step: int, gain: float) -> None:
        """A check is due, and so much is gained at present."""
        sure_gain = SURE_GAIN if self._num_checks >= SURE_CHECKS else SURE_AT_ONCE
        is_sure = gain > sure_gain and step - self._timed_at < SURE_STEPS
        self._num_checks += not is_sure
        self._check_steps = min(2 * self._check_steps, CHECK_STEPS)
        self._to_come, self._since_check = 0 if is_sure else SETTLED_STEPS, 0

    def takes_one(self) -> bool:
        """Whether the next step is a plain one of a check."""
        if self._to_come:
            self._to_come -= 1
            return True
        return False

    def ends(self) -> None:
        """Nobody drafts any more."""
        self._to_come = self._since_check = 0

    def step_s(self, step: int, outcome: Outcome, has_drafts: bool, has_prompts: bool, num_passed: int) -> float | None:
        """A step is done; num_passed: others before it that were not looked at. What it says of the time that such a
        step takes in the long run; None where that is nothing."""
        if has_drafts:
            self._since_check += 1
            self._in_a_row = 0
            return None if has_prompts else outcome.step_s
        self._in_a_row = 0 if has_prompts else self._in_a_row + 1
        if has_prompts:
            return None
        if outcome.unseen_s is not None:
            self._unseen_at = step
            return outcome.unseen_s
        if num_passed:
            are_timed = self._unseen_at is not None and step - self._unseen_at <= STALE_STEPS
            return None if are_timed else outcome.step_s
        if self._in_a_row < SETTLED_STEPS and step - self._timed_at < UNSETTLED_STEPS:
            return None
        self._timed_at = step
        return outcome.step_s
