"""Contest of drafts on against off at one batch size, by measured time, and the account that bounds the loss. No torch.

The incumbent runs. The challenger replaces it for some steps. If that does not show clearly which one is faster, the
incumbent runs again, and the challenger is compared with its steps before and after, so that machine drift cancels.

The account holds seconds. It starts with the time of a few plain steps and earns a small share of all time. Steps that
are run for measurement are charged the time above what the best known choice takes for the same number of tokens; so
are drafts that turn out slower than plain steps. No contest begins while the account is nearly empty, and debt is never
forgiven. So

    seconds charged <= grant + EARNED_SHARE of all seconds + what the last step overdrew
"""

from math import hypot

from pipeline.engine.speculation.step_time import Rate, StepWindow

# The account, in plain steps, except the share
GRANT_STEPS = 8.0
MAX_BALANCE_STEPS = 24.0
PRICE_STEPS = 4.0  # expected loss of a contest
EARNED_SHARE = 0.005  # of all time

# A contest, in steps
MIN_WEIGHT, MAX_WEIGHT = 4.0, 12.0  # counted steps of a challenger
MAX_STEPS = 48  # of a challenger, counted or not
FIRST_PAUSE, MAX_PAUSE = 256, 2048  # until the next contest, while drafts are on;
FIRST_PAUSE_OFF = 64  # while they are off: lookup improves as outputs finish
RETRY = 32  # until the next one after a contest without a result
INHERITED = 64  # until the first one at a size that inherits another size's decision
MAX_LOST_STEPS = 4.0  # plain steps that drafts may lose before the next contest; doubled after a false alarm

# A contest, in ratios of speed
MARGIN = 1.05  # drafts must be this much faster than plain steps
CLEAR = (0.9, 1.25)  # outside these ratios the incumbent is not timed again
WIDE = 1.3  # after a loss by this ratio the next pause is four times as long, otherwise twice
MAX_ERROR = 0.04  # relative error below which no more steps are needed
CERTAIN = 3.0  # number of errors between a ratio and 1 for an earlier decision
OTHER_SIZE = 1.33  # ratio of batch sizes beyond which steps cannot be compared


def size_of(num_sequences: int) -> int:
    """Return log2 of the nearest power of two, so that a batch of 8 with one sequence missing keeps its size."""
    return ((2 * num_sequences * num_sequences).bit_length() - 1) // 2


class Account:
    """Seconds that measurements may still lose."""

    def __init__(self) -> None:
        self.balance_s = self._price_s = 0.0
        self._is_open = False

    def settle(self, elapsed_s: float, lost_s: float, plain_step_s: float) -> None:
        """Charge lost_s of elapsed_s. plain_step_s: time of a plain step; the first call opens the account."""
        if not self._is_open:
            self._is_open, self.balance_s = True, GRANT_STEPS * plain_step_s
        balance_s = self.balance_s + EARNED_SHARE * elapsed_s - lost_s
        self.balance_s = min(balance_s, max(MAX_BALANCE_STEPS * plain_step_s, self.balance_s))
        self._price_s = PRICE_STEPS * plain_step_s

    @property
    def can_pay(self) -> bool:
        """True if the balance suffices for another contest."""
        return self._is_open and self.balance_s >= self._price_s

    @property
    def is_in_debt(self) -> bool:
        return self.balance_s < 0.0


class Contest:
    """State at one batch size. size: see `size_of`. steps: number of steps run at it. is_on: whether drafts are the
    incumbent."""

    def __init__(self, size: int, last: "Contest | None" = None) -> None:
        """last: the previous size, whose decision this one inherits until its own first decision."""
        self.size = size
        self.is_on = last is not None and last.is_on
        self.is_running = False
        self.steps = self.num_sequences = 0
        self.slowdown: float | None = None  # time of drafted steps relative to plain ones, from the last contest
        self.lost_steps = 0.0  # time that drafts lost since they were last faster, in plain steps
        self.decided_at = -1 if last is None else last.decided_at  # number of the step, counted over all sizes
        self._max_lost_steps = MAX_LOST_STEPS
        self._windows = (StepWindow(), StepWindow())  # off, on
        self._due = 0 if self.decided_at < 0 else INHERITED
        self._pause = 0
        self._begun_at = self._num_at_begin = 0
        self._before: Rate | None = None  # the incumbent's, before the challenger
        self._between: Rate | None = None  # the challenger's, while the incumbent runs again

    def follow(self, last: "Contest") -> None:
        """Inherit "on" from the previous size if it is larger, and drafts won there after this size's decision."""
        if last.is_on and not self.is_on and last.size > self.size and last.decided_at > self.decided_at:
            self.is_on, self.decided_at = True, last.decided_at
            self._end()
            self._due = self.steps + INHERITED

    @property
    def drafts(self) -> bool:
        """True if the next step should have drafts."""
        return self.is_on != (self.is_running and self._between is None)

    def window(self, is_on: bool) -> StepWindow:
        return self._windows[is_on]

    def rate(self, is_on: bool, prefill_s: float) -> Rate | None:
        """Return the rate of one side; None if too few steps were timed."""
        rate = self._windows[is_on].rate(prefill_s)
        return None if rate is None or rate.weight < MIN_WEIGHT else rate

    def off_s(self, prefill_s: float) -> float | None:
        """Return the time of a plain step at this size; None if unknown."""
        rate = self.rate(False, prefill_s)
        return None if rate is None else rate.step_s

    # -- contests

    def is_due(self) -> bool:
        return self.steps >= self._due or self.lost_steps > self._max_lost_steps

    def begin(self, prefill_s: float) -> None:
        assert not self.is_running
        if self.lost_steps > self._max_lost_steps:
            self._max_lost_steps *= 2.0
        self._before, self._between = self.rate(self.is_on, prefill_s), None
        self.is_running, self._begun_at, self._num_at_begin = True, self.steps, self.num_sequences
        self.window(not self.is_on).clear()

    def judge(self, prefill_s: float, must_end: bool, now: int) -> None:
        """End the contest if its steps suffice. must_end: there is no credit for another step. now: number of the
        step over all sizes."""
        assert self.is_running
        rate = self.rate(self.drafts, prefill_s)
        is_late = must_end or self.steps - self._begun_at >= MAX_STEPS
        is_other_size = not 1.0 / OTHER_SIZE < self.num_sequences / self._num_at_begin < OTHER_SIZE
        if is_other_size or rate is None:
            if is_late or is_other_size:  # no result
                self._due = self.steps + RETRY
                self._end()
            return
        if self._between is not None:  # the incumbent runs again
            before = self._before or rate
            (ratio, error), (other, other_error) = _ratio(before, self._between), _ratio(rate, self._between)
            ratio, error = 0.5 * (ratio + other), max(error, other_error)
            slowdown = 2.0 * self._between.step_s / (before.step_s + rate.step_s)
        else:
            ratio, error = (1.0, 1.0) if self._before is None else _ratio(self._before, rate)
            slowdown = None if self._before is None else rate.step_s / self._before.step_s
        is_sure = not CLEAR[0] < ratio < CLEAR[1] and abs(ratio - 1.0) > CERTAIN * error
        is_enough = is_late or (rate.weight >= MAX_WEIGHT and error < MAX_ERROR)
        if is_enough and self._between is None and not is_sure and not must_end:
            self._between, self._begun_at = rate, self.steps
            self.window(self.is_on).clear()
        elif is_enough or (is_sure and (ratio < 1.0 or rate.weight >= MAX_WEIGHT)):  # a winner may as well continue
            if slowdown is not None:
                self.slowdown = 1.0 / slowdown if self.is_on else slowdown
            self.decided_at = now
            self._decide(ratio, error)

    def _decide(self, ratio: float, error: float) -> None:
        """Decide by `ratio`, the challenger's speed relative to the incumbent's."""
        if ratio > (1.0 / MARGIN if self.is_on else max(MARGIN, 1.0 + error)):
            self.is_on = not self.is_on
            self._pause, self._max_lost_steps = 0, MAX_LOST_STEPS
        factor = 2 if CLEAR[0] < ratio < WIDE else 4
        first = FIRST_PAUSE if self.is_on else FIRST_PAUSE_OFF
        self._pause = min(factor * self._pause, MAX_PAUSE) if self._pause else first
        self._due = self.steps + self._pause
        self._end()

    def _end(self) -> None:
        self.is_running, self._between, self.lost_steps = False, None, 0.0


def _ratio(incumbent: Rate, challenger: Rate) -> tuple[float, float]:
    """Return the challenger's relative speed and its error."""
    return incumbent.token_s / challenger.token_s, hypot(incumbent.error, challenger.error)
