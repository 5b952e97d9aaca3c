"""Trying a request to a store again: how often, after which waits, and how many tries it took.

A request is tried again when the answer says that another try may go better (`store_errors.fault_of`): throttling, 5xx,
timeouts, resets, bodies that come short, conflicts. What will not get better (no such file, no right, a condition not
met) is raised at once, as the store's library says it.
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
    """Bounds of one request: the i-th wait is random, from 0 to min(max_wait_s, first_wait_s * 2^i)."""

    max_tries: int = 8
    first_wait_s: float = 0.5
    max_wait_s: float = 20.0
    total_s: float = 120.0  # no try begins later than this
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random

    def wait_s(self, tries: int) -> float:
        return self.random() * min(self.max_wait_s, self.first_wait_s * 2**tries)


class RetryCounts:
    """How often requests to stores were tried again, by `Fault`. Who wants to know makes one and hands it to what opens
    filesystems, which count into it. Safe for threads."""

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
    place: Callable[[], str],
    said: Callable[[BaseException], str],
) -> T:
    """request(), tried within the bounds of `policy`.

    renew: reads credentials again, once, when the store says that they have expired. place and said: what is asked for,
    and an error's text, as a message may show them. Raises what `request` raised where trying again cannot help,
    EnvironmentFailed after the last try.
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
                        f"{place()}: the store says that the credentials have expired or are not valid ({said(e)}), "
                        "also after reading them afresh; renew them and run the same command again, it goes on where "
                        "it stopped"
                    ) from None
                renewed = True
                counts.add(fault)
                renew()
                continue
            wait = policy.wait_s(tries - 1)
            spent = policy.clock() - began
            if tries >= policy.max_tries or spent + wait > policy.total_s:
                raise EnvironmentFailed(
                    f"{place()}: given up after {tries} tries in {spent:.0f} s ({fault.value}); the last answer: "
                    f"{said(e)}. When the store answers again, run the same command"
                ) from None
            counts.add(fault)
        policy.sleep(wait)
