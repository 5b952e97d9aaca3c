"""Concurrent calls in several threads."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """Return the results of work(0) to work(count - 1), in the order in which they ended."""
    done: list[T] = []
    threads = [threading.Thread(target=lambda i=i: done.append(work(i))) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == count
    return done
