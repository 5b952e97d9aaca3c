"""Reads ahead: in order, a bounded number at once, and closing waits for no hanging read."""

import subprocess
import sys
import threading
import time

import pytest

from pipeline.stores.read_ahead import AHEAD, read_ahead


def test_results_are_in_order_and_a_bounded_number_is_requested():
    requested, lock, running, max_running = [], threading.Lock(), 0, 0

    def items():
        for i in range(500):
            requested.append(i)
            yield i

    def read(i: int) -> int:
        nonlocal running, max_running
        with lock:
            running += 1
            max_running = max(max_running, running)
        time.sleep(0.0005 * (i % 3))  # they finish in another order
        with lock:
            running -= 1
        return 2 * i

    num_results = 0
    for i, got in read_ahead(read, items(), 4):
        assert (i, got) == (num_results, 2 * num_results)
        num_results += 1
        assert len(requested) - num_results < 4 * AHEAD
    assert num_results == 500
    assert 1 < max_running <= 4


def test_a_failure_is_raised_in_order_and_ends_the_rest():
    began = []

    def read(i: int) -> int:
        began.append(i)
        if i >= 3:
            raise ValueError(f"read {i}")
        return i

    reads = read_ahead(read, range(1000), 2)
    assert [next(reads) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match="read 3"):
        next(reads)
    assert len(began) <= 4 + 2 * AHEAD


def test_closing_waits_for_no_read_and_starts_none():
    began, hang = [], threading.Event()

    def read(i: int) -> int:
        began.append(i)
        if i > 0:
            hang.wait()
        return i

    reads = read_ahead(read, range(1000), 2)
    assert next(reads) == (0, 0)
    started = time.monotonic()
    reads.close()
    assert time.monotonic() - started < 20
    hang.set()
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join(10)
    assert len(began) <= 3


def test_the_end_of_the_process_waits_for_no_read():
    program = (
        "import time\n"
        "from pipeline.stores.read_ahead import read_ahead\n"
        "reads = read_ahead(lambda i: time.sleep(60 * i), range(100), 2)\n"
        "next(reads)\n"
        "raise KeyboardInterrupt\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert "KeyboardInterrupt" in done.stderr
