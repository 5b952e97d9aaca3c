"""The number of open requests that keeps one server busy, found while it works. Pure bookkeeping: times are arguments.

A server that reports its queue (`/metrics`) shows the answer: as many requests as it runs, and a few waiting. Without
these gauges the window grows by a factor while that raises the rate of tokens, and from time to time a larger one is
tried: too large a window costs little, as requests wait at the server instead of here, too small a one costs time. An
overloaded server (429, 503) shrinks the window by a factor, after which it grows by a constant (AIMD; Chiu and Jain,
1989).
"""

FIRST = 16
MIN_ANSWERS = 8  # over which a rate is measured
FACTOR = 4.0  # growth of the window
GROWTH = 1.15  # a window that is FACTOR times larger must raise the rate by this factor
HELD_EPOCHS = 8  # epochs between trials of a larger window
GAUGE_GROWTH = 1.25  # of the window, if the gauges show too few waiting requests
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
        self._rate = 0.0  # tokens a second of the window before the last growth
        self._fallback = self._limit  # window to hold if the last growth does not raise the rate
        self._held_epochs = HELD_EPOCHS  # epochs without growth; HELD_EPOCHS: growing
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
        if len(self._points) > max(int(self._limit), MIN_ANSWERS):
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
        self._overloaded_at = self._limit
        self._begin_epoch(now_s, num_open)

    def add_gauges(self, running: float, waiting: float, num_open: int) -> None:
        """Record the server's own numbers of running and waiting requests."""
        self._has_gauges = True
        allowed = max(2.0, WAITING * running)
        if waiting > 2 * allowed:
            self._limit = max(1.0, num_open - waiting + allowed)
        elif waiting < allowed and num_open >= int(self._limit):
            self._limit = min(self._max, self._limit * GAUGE_GROWTH + 1)

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
        """Return the window after an epoch: a larger one after growth that raised the rate and after HELD_EPOCHS
        without growth, else `_fallback`."""
        span_s = max(self._points[-1][0] - self._points[0][0], 1e-6)
        rate = sum(tokens for _, tokens in self._points[1:]) / span_s
        larger = min(self._max, FACTOR * self._limit)
        if self._held_epochs < HELD_EPOCHS:
            self._held_epochs += 1
            if self._held_epochs < HELD_EPOCHS:
                return self._limit
            self._rate, self._fallback = rate, self._limit
        elif rate > GROWTH * self._rate:
            self._rate, self._fallback = rate, larger
        else:
            self._held_epochs = 0
            return self._fallback
        return larger
