"""Retries of requests to a store, with exponential backoff and counts.

A request is retried if the error is transient (`store_errors.fault_of`): throttling, 5xx, timeouts, resets, truncated
bodies, conflicts. Permanent errors (no such file, no permission, a failed precondition) are raised at once, as the
store's library raised them.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pipeline.errors import EnvironmentFailed
from pipeline.stores.store_errors import Fault, fault_of

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Retry limits of one request. The i-th wait is random, from 0 to min(max_wait_s, first_wait_s * 2^i)."""

    max_tries: int = 8
    first_wait_s: float = 0.5
    max_wait_s: float = 20.0
    total_s: float = 120.0  # no try starts later than this
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random

    def wait_s(self, tries: int) -> float:
        return self.random() * min(self.max_wait_s, self.first_wait_s * 2**tries)


class RetryCounts:
    """Number of retried requests by `Fault`. Pass it to functions that open filesystems, which count into it.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._counts[fault.value] += 1

    def counted(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def with_retries(
    request: Callable[[], T],
    renew: Callable[[], None],
    policy: RetryPolicy,
    counts: RetryCounts,
    shown: Callable[[], str],
    error_text: Callable[[BaseException], str],
) -> T:
    """Return request(), retried within the limits of `policy`.

    renew: called once to read the credentials again if they have expired. shown and error_text: return the path and an
    error's text for messages, redacted. Raises permanent errors of `request`, and EnvironmentFailed after the last try.
    """
    began, renewed, tries = policy.clock(), False, 0
    while True:
        tries += 1
        try:
            return request()
        except Exception as e:
            fault = fault_of(e)
            if fault is None:
                raise
            if fault is Fault.CREDENTIALS:
                if renewed:
                    raise EnvironmentFailed(
                        f"{shown()}: the credentials have expired or are invalid ({error_text(e)}), even after reading "
                        "them again; renew them and rerun the same command to resume"
                    ) from None
                renewed = True
                counts.add(fault)
                renew()
                continue
            wait = policy.wait_s(tries - 1)
            spent = policy.clock() - began
            if tries >= policy.max_tries or spent + wait > policy.total_s:
                raise EnvironmentFailed(
                    f"{shown()}: gave up after {tries} tries in {spent:.0f} s ({fault.value}); the last error: "
                    f"{error_text(e)}. When the store is available again, rerun the same command to resume"
                ) from None
            counts.add(fault)
        policy.sleep(wait)
