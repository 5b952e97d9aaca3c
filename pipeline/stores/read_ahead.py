"""Concurrent small reads, with a bounded number of them ahead of the consumer.

A ThreadPoolExecutor does not fit: its `map` submits everything at once, and the process waits for its threads on exit.
Here neither an interrupt nor the exit of the process waits for a read that hangs.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # reads that are submitted and not yet consumed, per thread


def read_ahead(read: Callable[[T], R], items: Iterable[T], at_once: int) -> Generator[tuple[T, R]]:
    """Yield each item with `read(item)`, in order. `at_once` daemon threads read up to AHEAD * `at_once` items ahead.

    Raises the error of a read when its turn comes. Closing the generator starts no further read and waits for none.
    """
    tasks: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            item, future = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(read(item))
            except BaseException as error:
                future.set_exception(error)

    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for _ in range(at_once):
            threading.Thread(target=work, daemon=True, name="read-ahead").start()
        for item in items:
            pending.append((item, Future()))
            tasks.put(pending[-1])
            if len(pending) == AHEAD * at_once:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        for _, future in pending:
            future.cancel()
        for _ in range(at_once):
            tasks.put(None)
