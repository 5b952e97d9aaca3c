"""A line every few seconds for work whose amount is known: how much is done and how long the rest will take."""

import time
from collections.abc import Callable

SAY_EVERY_S = 5.0


class Remaining:
    """`remaining(done)` tells `say`, every few seconds: "what: 12 of 40, 30% (about 2 min left)".

    first: how much was done before, by work that says nothing of how fast this is.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        what: str,
        total: int,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._what, self._total, self._first, self._clock = say, what, total, first, clock
        self._began = self._said = clock()

    def __call__(self, done: int) -> None:
        now = self._clock()
        if now < self._said + SAY_EVERY_S or done <= self._first:
            return
        self._said = now
        left_s = (now - self._began) / (done - self._first) * (self._total - done)
        self._say(
            f"{self._what}: {done:,} of {self._total:,}, {done / self._total:.0%} (about {_duration(left_s)} left)"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
