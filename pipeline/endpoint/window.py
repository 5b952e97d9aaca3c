"""The number of open requests that keeps one server busy, found while it works. Pure bookkeeping: times are arguments.

A server that reports its queue (`/metrics`) shows the answer: as many requests as it runs, and a few waiting. Without
these gauges the window follows the rate of tokens: it grows by a factor while that raises the rate, then bisection
finds the smallest window with the maximum rate, and from time to time a larger and a smaller one are tried. An
overloaded server (429, 503) shrinks the window by a factor, after which it grows by a constant (AIMD; Chiu and Jain,
1989).
"""

from typing import Literal

FIRST = 16
MIN_ANSWERS = 8  # over which a rate is measured
TURNS = 6  # turns of the window over which a rate is measured, once it no longer grows
MANY_ANSWERS = 1024  # enough for a rate: large windows are measured over fewer turns
FACTOR = 4.0  # growth of the window: too large a window costs little, too small a one costs time
GROWTH = 1.15  # a window that is FACTOR times larger must raise the rate by this factor
GAIN = 1.05  # a window that is TRIAL times larger must raise the rate by this factor
SAME = 0.985  # of the maximum rate: a smaller window with this rate is good enough
CLOSE = 1.08  # ratio of the bounds at which the bisection ends
HELD_EPOCHS = 8  # epochs between trials of a larger or a smaller window
TRIAL = 1.25
SMALLER = 1.1
DECREASE = 0.97
FAST_DECREASE = 0.75  # if there was no answer since the last overload
INCREASE = 0.01  # of the window at which the server was overloaded, in each epoch
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 10.0  # after a rejection; doubles until there is an answer
WAITING = 0.03  # requests that may wait at the server, as a share of the running ones


class Window:
    """Window of one server: at most `size` open requests."""

    def __init__(self, max_size: int, now_s: float) -> None:
        self._max = float(max_size)
        self._limit = min(float(FIRST), self._max)
        self._pause_until_s, self._pause_s = now_s, MIN_PAUSE_S
        self._phase: Literal["grow", "measure", "search", "hold", "larger", "smaller"] = "grow"
        self._low, self._high = 1.0, 1.0  # bounds of the smallest window with the maximum rate
        self._rate = 0.0  # tokens a second; while growing of the last window, then of `_high`
        self._held_epochs = self._num_trials = 0
        self._overloaded_at = 0.0  # window at the last overload; 0: never
        self._has_gauges = False
        self._begin_epoch(now_s, 0)

    def size(self, now_s: float) -> int:
        """Return the number of requests that may be open now."""
        return 0 if self.paused_s(now_s) else int(self._limit)

    def paused_s(self, now_s: float) -> float:
        """Return the time until requests may be sent again after a rejection."""
        return max(0.0, self._pause_until_s - now_s)

    def answered(self, now_s: float, tokens: int, num_open: int) -> None:
        """Record an answer. num_open: open requests before the answer."""
        self._pause_s = MIN_PAUSE_S
        self._is_full = self._is_full or num_open >= int(self._limit)
        if self._num_earlier > 0:  # about as many answers come from the window before
            self._num_earlier -= 1
            return
        self._points.append((now_s, tokens + 1))
        turn = int(self._limit)
        turns = 1 if self._phase == "grow" or self._overloaded_at else max(2, min(TURNS, MANY_ANSWERS // turn))
        if len(self._points) > turn * max(turns, -(-MIN_ANSWERS // turn)):
            self._end_epoch(now_s, num_open)

    def overloaded(self, now_s: float, sent_s: float, wait_s: float | None, num_open: int) -> None:
        """Record a rejected request. wait_s: the pause that the server asks for. Rejections of requests that were sent
        under the same window count once."""
        if wait_s is not None:
            self._pause_until_s = max(self._pause_until_s, now_s + wait_s)
        if sent_s <= self._epoch_s:
            return
        self._pause_until_s = max(self._pause_until_s, now_s + self._pause_s)
        self._limit = max(1.0, self._limit * (DECREASE if self._pause_s == MIN_PAUSE_S else FAST_DECREASE))
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        self._overloaded_at, self._phase = self._limit, "hold"
        self._begin_epoch(now_s, num_open)

    def add_gauges(self, running: float, waiting: float, num_open: int) -> None:
        """Record the server's own numbers of running and waiting requests."""
        self._has_gauges = True
        allowed = max(2.0, WAITING * running)
        if waiting > 2 * allowed:
            self._limit = max(1.0, num_open - waiting + allowed)
        elif waiting < allowed and num_open >= int(self._limit):
            self._limit = min(self._max, self._limit * TRIAL + 1)

    def _begin_epoch(self, now_s: float, num_open: int) -> None:
        self._epoch_s, self._num_earlier, self._is_full = now_s, num_open, False
        self._points: list[tuple[float, int]] = []  # time and tokens of each answer

    def _end_epoch(self, now_s: float, num_open: int) -> None:
        if self._is_full and not self._has_gauges:  # else the rows, not the window, limit the rate
            if self._overloaded_at:
                self._limit = min(self._max, self._limit + max(0.25, INCREASE * self._overloaded_at))
            else:
                self._limit = self._next_limit()
        self._begin_epoch(now_s, num_open)

    def _next_limit(self) -> float:
        limit = self._limit
        if self._phase == "grow":
            span_s = max(self._points[-1][0] - self._points[0][0], 1e-6)
            rate = sum(tokens for _, tokens in self._points[1:]) / span_s
            if rate > GROWTH * self._rate:
                self._low, self._high, self._rate = self._high, limit, rate
                if limit < self._max:
                    return min(self._max, FACTOR * limit)
            self._high, self._phase = limit, "measure"
            return limit
        return self._follow(_rate(self._points))

    def _follow(self, rate: float) -> float:
        limit, is_same = self._limit, rate >= SAME * self._rate
        match self._phase:
            case "measure":
                self._rate, self._phase = rate, "search"
            case "larger" if rate > GAIN * self._rate:
                self._low, self._high, self._rate, self._phase = self._high, limit, rate, "grow"
                return min(self._max, FACTOR * limit)
            case "search" | "smaller" if is_same:
                self._high, self._phase = limit, "search"
            case "search":
                self._low = limit
            case "hold":
                return self._held(rate)
            case _:
                self._phase = "hold"
        if self._phase == "search":
            if self._high > max(CLOSE * self._low, self._low + 1):
                return self._low ** (1 / 3) * self._high ** (2 / 3)  # too small a window costs time
            self._phase = "hold"
        return self._high

    def _held(self, rate: float) -> float:
        self._rate += (rate - self._rate) / 4  # rows change over a job
        self._held_epochs += 1
        if self._held_epochs % HELD_EPOCHS:
            return self._high
        self._num_trials += 1
        self._low = max(1.0, self._high / SMALLER)
        self._phase = "larger" if self._num_trials % 2 else "smaller"
        return self._low if self._phase == "smaller" else min(self._max, self._high * TRIAL)


def _rate(points: list[tuple[float, int]]) -> float:
    """Return the tokens a second, weighted such that answers at both ends count least. Equally long requests end in
    waves, so a plain mean would depend on the waves that begin and end the measurement."""
    begin_s, span_s = points[0][0], max(points[-1][0] - points[0][0], 1e-6)
    positions = [((time_s - begin_s) / span_s, tokens) for time_s, tokens in points]
    return sum(tokens * 30 * (x * (1 - x)) ** 2 for x, tokens in positions) / span_s
