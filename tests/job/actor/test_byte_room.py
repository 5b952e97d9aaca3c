"""Limit of the bytes that threads hold together."""

import threading
import time

from pipeline.job.actor.byte_room import ByteRoom


def test_bytes_that_do_not_fit_wait_and_a_larger_block_runs_alone():
    room, used, most, alone = ByteRoom(10), [0], [0], [0]

    def work(size: int) -> None:
        with room.holding(size):
            used[0] += size
            most[0] = max(most[0], used[0] if size <= 10 else 0)
            alone[0] += size > 10 and used[0] == size
            time.sleep(0.01)
            used[0] -= size

    threads = [threading.Thread(target=work, args=(size,)) for size in (4, 4, 4, 25, 3, 3, 30, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert used == [0]
    assert 6 <= most[0] <= 10
    assert alone == [2]
