"""Many small reads at once, a bounded number of them ahead of whoever takes the results.

Not a ThreadPoolExecutor: its `map` asks for everything at once, and the end of the process waits for its threads. Here
an interruption, or the end of the process, waits for no read, also not for one that hangs.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # reads asked for and not yet taken, for each one at work


def read_ahead(read: Callable[[T], R], items: Iterable[T], at_once: int) -> Generator[tuple[T, R]]:
    """Each item with `read(item)`, in order. `at_once` reads run, in daemon threads; 4 times as many are asked for.

    Raises what a read raised, when its turn comes. Closing it begins no further read and waits for none.
    """
    todo: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()

    def work() -> None:
        while (asked := todo.get()) is not None:
            item, future = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(read(item))
            except BaseException as error:
                future.set_exception(error)

    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for _ in range(at_once):
            threading.Thread(target=work, daemon=True, name="read-ahead").start()
        for item in items:
            waiting.append((item, Future()))
            todo.put(waiting[-1])
            if len(waiting) == AHEAD * at_once:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
        for _ in range(at_once):
            todo.put(None)
