"""Work done in several threads at once."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """What work(0) to work(count - 1) returned, in the order in which they ended."""
    done: list[T] = []
    threads = [threading.Thread(target=lambda i=i: done.append(work(i))) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == count
    return done
