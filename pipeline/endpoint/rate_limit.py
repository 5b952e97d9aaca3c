"""Limits of requests and tokens a minute. Times are arguments."""

BURST_S = 1.0  # requests that may be sent at once after a pause, in seconds of the limit


class RateLimit:
    """Limits of all servers of an engine. A request is sent if no limit is in debt, and then counts in each one: the
    mean rates are those of the limits, and no request is too large for one."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        """None: unlimited."""
        self._requests = None if requests_per_minute is None else _Bucket(requests_per_minute / 60, now_s)
        self._tokens = None if tokens_per_minute is None else _Bucket(tokens_per_minute / 60, now_s)

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent now."""
        return all(limit is None or limit.level(now_s) >= 0 for limit in (self._requests, self._tokens))

    def sent(self, tokens: int, now_s: float) -> None:
        """Record a request that may cost this many tokens."""
        if self._requests is not None:
            self._requests.remove(1, now_s)
        if self._tokens is not None:
            self._tokens.remove(tokens, now_s)

    def settle(self, unused_tokens: int, now_s: float) -> None:
        """Record that an answer had fewer tokens than its request was expected to cost."""
        if self._tokens is not None:
            self._tokens.remove(-unused_tokens, now_s)


class _Bucket:
    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s, self._level, self._now_s = per_s, 0.0, now_s

    def level(self, now_s: float) -> float:
        """Return what may be sent at once; below 0: what was sent too early."""
        self._level = min(self._per_s * BURST_S, self._level + self._per_s * (now_s - self._now_s))
        self._now_s = now_s
        return self._level

    def remove(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount
