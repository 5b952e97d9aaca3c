"""Arms against each other at one size of batch: incumbent, challenger, incumbent. No torch.

The incumbent runs. A challenger is run for some steps in its place. Where that does not say clearly which is faster,
the incumbent's steps before it and after it are taken together, so that a drift of the machine cancels. Whoever loses
waits twice as long for its next turn.
"""

from math import sqrt

from pipeline.engine.speculation.arms import OFF, Arm
from pipeline.engine.speculation.step_time import Rate, Window

MARGIN = 1.03  # drafts have to be so much faster than plain steps, and an arm than the incumbent
CLEAR = (0.9, 1.25)  # the incumbent is not asked again outside of these ratios
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 12.0  # steps that are counted of a challenger
MOST_ERROR = 0.04  # relative, until which more are counted
CERTAIN = 3.0  # a ratio that is so many errors away from 1 is believed before
MOST_STEPS = 64  # of a challenger, counted or not
WIDE = 1.3  # plain steps that lose by so much are not measured again soon
FIRST_PAUSE, MOST_PAUSE = 256, 8192  # steps until the next turn


class Contest:
    """steps: that were run at this size of batch. off_share: the time of a plain step by that of the incumbent, where
    plain steps were not measured here."""

    def __init__(self, incumbent: Arm = OFF, off_share: float | None = None) -> None:
        self.incumbent, self.challenger = incumbent, None
        self.off_share = off_share
        self.steps = 0
        self._windows: dict[Arm, Window] = {}
        self._due: dict[Arm, int] = {}
        self._pause: dict[Arm, int] = {}
        self._before: Rate | None = None  # the incumbent's, before the challenger
        self._between: Rate | None = None  # the challenger's, while the incumbent runs again
        self._begun_at = 0

    @property
    def active(self) -> Arm:
        return self.incumbent if self.challenger is None or self._between is not None else self.challenger

    def window(self, arm: Arm) -> Window:
        if arm not in self._windows:
            self._windows[arm] = Window()
        return self._windows[arm]

    def rate(self, arm: Arm, prefill_s: float) -> Rate | None:
        window = self._windows.get(arm)
        return None if window is None else window.rate(prefill_s)

    def off_s(self, prefill_s: float) -> float | None:
        """What a plain step takes here; None: nothing is known."""
        rate = self.rate(OFF, prefill_s)
        if rate is not None and rate.weight >= LEAST_WEIGHT:
            return rate.step_s
        rate = self.rate(self.incumbent, prefill_s)
        return None if rate is None or self.off_share is None else self.off_share * rate.step_s

    # -- turns

    def is_due(self, arm: Arm, first: int = 0) -> bool:
        """first: steps before its first turn."""
        return self.steps >= self._due.get(arm, first)

    def wait(self, arm: Arm, steps: int) -> None:
        self._due[arm] = self.steps + steps

    def begin(self, challenger: Arm, prefill_s: float) -> None:
        assert self.challenger is None
        self._before, self._between = self.rate(self.incumbent, prefill_s), None
        self.challenger, self._begun_at = challenger, self.steps
        self.window(challenger).clear()

    def judge(self, prefill_s: float, has_to_end: bool) -> bool:
        """After a step of the one that is active: whether the contest is over."""
        assert self.challenger is not None
        rate = self.rate(self.active, prefill_s)
        is_late = has_to_end or self.steps - self._begun_at >= MOST_STEPS
        if rate is None or (rate.weight < LEAST_WEIGHT and not is_late):
            if is_late:
                self._decide(0.0, 0.0)
            return is_late
        is_enough = is_late or (rate.weight >= MOST_WEIGHT and rate.error < MOST_ERROR)
        if self._between is not None:  # the incumbent again
            if is_enough:
                before = rate if self._before is None else self._before
                error = sqrt(0.5 * (before.error**2 + rate.error**2) + self._between.error**2)
                self._decide(0.5 * (before.token_s + rate.token_s) / self._between.token_s, error)
            return is_enough
        before = self._before
        if before is not None:
            ratio, error = before.token_s / rate.token_s, sqrt(before.error**2 + rate.error**2)
            is_clear = not CLEAR[0] < ratio < CLEAR[1]
            if is_clear and (is_enough or abs(ratio - 1.0) > CERTAIN * error):
                self._decide(ratio, error)
                return True
        if is_enough:
            self._between, self._begun_at = rate, self.steps
            self.window(self.incumbent).clear()
        return False

    def _decide(self, ratio: float, error: float) -> None:
        """ratio: how many times as fast as the incumbent."""
        challenger = loser = self.challenger
        assert challenger is not None
        assert loser is not None
        least = 1.0 / MARGIN if challenger == OFF else max(MARGIN, 1.0 + error)
        if ratio > least:
            loser, self.incumbent = self.incumbent, challenger
            self._pause[challenger] = FIRST_PAUSE
            if loser == OFF and ratio > WIDE:
                self._pause[loser] = MOST_PAUSE
        pause = self._pause.get(loser, FIRST_PAUSE)
        self._due[loser] = self.steps + pause
        self._pause[loser] = min(2 * pause, MOST_PAUSE)
        self.challenger = self._between = None
