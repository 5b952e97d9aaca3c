"""Arms against each other at one size of batch: incumbent, challenger, incumbent. No torch.

The incumbent runs. A challenger is run for some steps in its place. Where that does not say clearly which is faster,
the incumbent's steps before it and after it are taken together, so that a drift of the machine cancels. Whoever loses
waits twice as long for its next turn.
"""

from math import hypot

from pipeline.engine.speculation.arms import OFF, Arm
from pipeline.engine.speculation.step_time import Rate, Window

MARGIN = 1.05  # drafts have to be so much faster than plain steps, and an arm than the incumbent
CLEAR = (0.9, 1.25)  # the incumbent is not asked again outside of these ratios
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 12.0  # steps that are counted of a challenger
MOST_ERROR = 0.04  # relative, until which more are counted
CERTAIN = 3.0  # a ratio that is so many errors away from 1 is believed before
MOST_STEPS = 48  # of a challenger, counted or not;
END_STEPS = 24  # at a job's end, where rows whose drafts fell by chance keep it waiting
WIDE = 1.3  # times as fast: who loses by so much has its next turn later
FIRST_PAUSE, MOST_PAUSE = 256, 8192  # steps until the next turn
ALARM = 4.0  # plain steps that drafts may lose before plain ones are measured again, twice as many after a false alarm
NEXT_TRY = 32  # steps after a contest that nobody won
OTHER_SIZE = 1.33  # a batch that is so many times as large or small is another one: its steps cannot be compared
INHERITED_CHECK = 64  # steps until plain ones are measured at a size that goes on as another


class Contest:
    """size: see `arms.bucket_of`. steps: that were run at it."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.incumbent: Arm = OFF
        self.challenger: Arm | None = None
        self.steps = self._num_sequences = self._num_at_begin = 0
        self._now, self._decided_at = 0, -1  # in steps at all sizes; -1: no arm was compared with another one yet
        self._parent: Contest | None = None  # what is not known here is as there
        self._windows: dict[Arm, Window] = {}
        self._due: dict[Arm, int] = {}
        self._pause: dict[Arm, int] = {}
        self._measured: dict[Arm, float] = {}  # slowdowns, as contests with plain steps found them
        self._before: Rate | None = None  # the incumbent's, before the challenger
        self._between: Rate | None = None  # the challenger's, while the incumbent runs again
        self._begun_at = 0
        self.lost_steps = 0.0  # plain ones, that drafts lost since they were faster the last time
        self.alarm = ALARM

    def looked(self, num_sequences: int, now: int) -> None:
        """At a step. now: how many steps at all sizes."""
        self._num_sequences, self._now = num_sequences, now

    def follow(self, last: "Contest") -> None:
        """Go on as at the size of the last steps where nothing was decided here, or before drafts won at that, larger
        size."""
        is_new = self._decided_at < 0
        if is_new:
            if self._parent is None:
                self._due[OFF] = self.steps + INHERITED_CHECK
            self._parent = last if last._decided_at >= 0 else last._parent
        is_old = last.size > self.size and last._decided_at > self._decided_at and last.incumbent != OFF
        if self.incumbent != last.incumbent and (is_new or is_old):
            self.incumbent, self.challenger, self._between = last.incumbent, None, None
            self._due[OFF] = self.steps + INHERITED_CHECK

    @property
    def active(self) -> Arm:
        return self.incumbent if self.challenger is None or self._between is not None else self.challenger

    def window(self, arm: Arm) -> Window:
        if arm not in self._windows:
            self._windows[arm] = Window()
        return self._windows[arm]

    def forget(self, arm: Arm) -> None:
        """What steps of the arm and of the incumbent took: it seems to be wrong, or was long ago."""
        for each in (arm, self.incumbent):
            self.window(each).clear()

    def rate(self, arm: Arm, prefill_s: float) -> Rate | None:
        window = self._windows.get(arm)
        return None if window is None else window.rate(prefill_s)

    def off_s(self, prefill_s: float) -> float | None:
        """What a plain step takes here; None: nothing is known."""
        rate = self.rate(OFF, prefill_s)
        if rate is not None and rate.weight >= LEAST_WEIGHT:
            return rate.step_s
        rate, slowdown = self.rate(self.incumbent, prefill_s), None
        if self._parent is not None:
            slowdown = self._parent.slowdown(self.incumbent, prefill_s)
        return None if rate is None or slowdown is None else rate.step_s / slowdown

    def slowdown(self, arm: Arm, prefill_s: float) -> float | None:
        """How many times as long as plain steps those of the arm take, here or where it was seen last."""
        rate = self.rate(arm, prefill_s)
        if rate is not None and rate.weight >= LEAST_WEIGHT:
            off_s = self.off_s(prefill_s)
            return None if off_s is None else rate.step_s / off_s
        if self._parent is None:
            return None
        slowdown = self._parent.slowdown(arm, prefill_s)
        if slowdown is None or self._num_sequences >= self._parent._num_sequences:
            return slowdown
        # Among fewer sequences each adds as much to a step by its drafts.
        off, larger_s = self.rate(OFF, prefill_s), self._parent.off_s(prefill_s)
        slower = 1.0 if off is None or off.weight < LEAST_WEIGHT or larger_s is None else larger_s / off.step_s
        return 1.0 + (slowdown - 1.0) * slower * self._num_sequences / self._parent._num_sequences

    def measured_slowdown(self, arm: Arm) -> float | None:
        """The same as the last contest with plain steps found it: both were timed then, at one speed of the machine."""
        found = self._measured.get(arm)
        return self._parent.measured_slowdown(arm) if found is None and self._parent is not None else found

    # -- turns

    def is_due(self, arm: Arm, first: int = 0) -> bool:
        """first: steps before its first turn."""
        return self.steps >= self._due.get(arm, first)

    def begin(self, challenger: Arm, prefill_s: float) -> None:
        assert self.challenger is None
        self._before, self._between = self.rate(self.incumbent, prefill_s), None
        self.challenger, self._begun_at, self._num_at_begin = challenger, self.steps, self._num_sequences
        self.window(challenger).clear()

    def judge(self, prefill_s: float, has_to_end: bool, is_end: bool, slow: float) -> bool:
        """After a step of the one that is active: whether the contest is over. is_end: of the job, as far as is known.
        slow: of tokens with drafts, what share counts."""
        assert self.challenger is not None
        rate = self.rate(self.active, prefill_s)
        is_late = has_to_end or self.steps - self._begun_at >= (END_STEPS if is_end else MOST_STEPS)
        is_other_size = not 1.0 / OTHER_SIZE < self._num_sequences / self._num_at_begin < OTHER_SIZE
        if is_other_size or rate is None or rate.weight < LEAST_WEIGHT:
            if is_late or is_other_size:  # nobody won
                self._due[self.challenger] = self.steps + NEXT_TRY
                self.challenger = self._between = None
            return is_late or is_other_size
        if self._between is not None:  # the incumbent again
            before = rate if self._before is None else self._before
            ratios = [_ratio(each, self._between) for each in (before, rate)]
            ratio, error = 0.5 * (ratios[0][0] + ratios[1][0]), max(ratios[0][1], ratios[1][1])
            slowdown = 2.0 * self._between.step_s / (before.step_s + rate.step_s)
        else:
            ratio, error = (1.0, 1.0) if self._before is None else _ratio(self._before, rate)
            slowdown = None if self._before is None else rate.step_s / self._before.step_s
        if self.incumbent == OFF:
            ratio *= slow
        elif self.challenger == OFF:
            ratio /= slow
        is_clear = not CLEAR[0] < ratio < CLEAR[1]
        is_enough = is_late or (rate.weight >= MOST_WEIGHT and error < MOST_ERROR)
        if is_enough and self._between is None and not is_clear and not has_to_end:
            self._between, self._begun_at = rate, self.steps
            self.window(self.incumbent).clear()
            return False
        is_over = is_enough or (is_clear and abs(ratio - 1.0) > CERTAIN * error)
        if is_over:
            self._decide(ratio, error, slowdown)
        return is_over

    def _decide(self, ratio: float, error: float, slowdown: float | None) -> None:
        """ratio: how many times as fast as the incumbent. slowdown: as long as its steps."""
        challenger = loser = self.challenger
        assert challenger is not None
        assert loser is not None
        self._decided_at, self.lost_steps = self._now, 0.0
        if slowdown is not None and self.incumbent == OFF:
            self._measured[challenger] = slowdown
        elif slowdown is not None and challenger == OFF:
            self._measured[self.incumbent] = 1.0 / slowdown
        least = 1.0 / MARGIN if challenger == OFF else max(MARGIN, 1.0 + error)
        if ratio > least:
            loser, self.incumbent = self.incumbent, challenger
            self._pause[challenger] = FIRST_PAUSE
            if challenger == OFF:
                self.alarm = ALARM
        pause = self._pause.get(loser, FIRST_PAUSE)
        self._due[loser] = self.steps + pause
        self._pause[loser] = min((2 if CLEAR[0] < ratio < WIDE else 4) * pause, MOST_PAUSE)
        self.challenger = self._between = None


def _ratio(incumbent: Rate, challenger: Rate) -> tuple[float, float]:
    """How many times as fast the challenger is, and the error of that."""
    return incumbent.token_s / challenger.token_s, hypot(incumbent.error, challenger.error)
