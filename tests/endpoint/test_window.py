"""The window against simulated servers, by a simulated clock: its rate against the best fixed window's."""

import collections
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import pytest

from pipeline.endpoint.window import FACTOR, FIRST, HELD_EPOCHS, Window

TURNS = 400  # of all slots, in a simulated job
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "constant": lambda rng: 100,
    "uniform": lambda rng: rng.randint(20, 180),
}


@dataclass(frozen=True, kw_only=True)
class SimulatedServer:
    """Server that computes `slots` requests at once in order of arrival, a token in 10 ms. It rejects requests beyond
    `limit`. In a batch each token takes 1 + slowdown * (running requests - 1) times as long."""

    slots: int = 1 << 30
    limit: int = 1 << 30
    slowdown: float = 0.0
    has_gauges: bool = False

    @property
    def best_window(self) -> int:
        return min(self.slots, self.limit)

    def simulate(
        self, window: Window | int, num_rows: int, length: Callable[[random.Random], int]
    ) -> tuple[float, list[int]]:
        """Compute the rows with a window or a fixed size. Return the seconds, and the window's size at each answer."""
        rng, events = random.Random(0), list[tuple[float, int, int, float]]()
        queue, sizes = collections.deque[tuple[int, int, float]](), list[int]()
        now_s = look_s = 0.0
        num_open = running = number = 0
        num_waiting_rows = num_rows

        def start(key: int, tokens: int, sent_s: float) -> None:
            seconds = 0.01 * tokens * (1 + self.slowdown * running)
            heapq.heappush(events, (now_s + seconds, key, tokens, sent_s))

        while len(sizes) < num_rows:
            while num_waiting_rows and num_open < (window if isinstance(window, int) else window.size(now_s)):
                num_waiting_rows, num_open, number = num_waiting_rows - 1, num_open + 1, number + 1
                if running + len(queue) >= self.limit:
                    heapq.heappush(events, (now_s + 0.01, number, 0, now_s))  # the rejection
                elif running >= self.slots:
                    queue.append((number, length(rng), now_s))
                else:
                    start(number, length(rng), now_s)
                    running += 1
            if not events:
                now_s += 0.01
                assert now_s < 1e5, "the window stays closed"
                continue
            now_s, _, tokens, sent_s = heapq.heappop(events)
            if isinstance(window, Window) and self.has_gauges and now_s >= look_s:
                window.add_gauges(running, len(queue), num_open)
                look_s = now_s + 0.5
            if not tokens:
                num_open, num_waiting_rows = num_open - 1, num_waiting_rows + 1
                if isinstance(window, Window):
                    window.overloaded(now_s, sent_s, None, num_open + 1)
                continue
            running -= 1
            if queue:
                start(*queue.popleft())
                running += 1
            if isinstance(window, Window):
                window.answered(now_s, tokens, num_open)
            num_open -= 1
            sizes.append(window if isinstance(window, int) else window.size(now_s))
        return now_s, sizes


SERVERS = [
    SimulatedServer(slots=12),
    SimulatedServer(slots=40),
    SimulatedServer(slots=100),
    SimulatedServer(slots=130),
    SimulatedServer(limit=20),
    SimulatedServer(limit=60),
    SimulatedServer(slots=64, slowdown=0.01),
    SimulatedServer(slots=128, slowdown=0.02),
    SimulatedServer(slots=40, has_gauges=True),
    SimulatedServer(slots=130, slowdown=0.01, has_gauges=True),
]


@pytest.mark.parametrize("server", SERVERS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_rate_is_near_that_of_the_best_fixed_window(server: SimulatedServer, lengths: str):
    best = server.best_window
    best_s, _ = server.simulate(best, TURNS * best, LENGTHS[lengths])
    seconds, sizes = server.simulate(Window(1024, 0.0), TURNS * best, LENGTHS[lengths])
    assert best_s / seconds >= 0.97
    usual = median(sizes[-len(sizes) // 4 :])
    if server.has_gauges or server.limit < 1 << 30:
        assert usual == pytest.approx(best, rel=0.1)
    else:  # the last growth that raised the rate, and the one that did not
        assert best <= usual <= best * FACTOR**2


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("is_limited", [False, True])
def test_few_slots_never_close_the_window(slots: int, is_limited: bool):
    server, window = SimulatedServer(slots=slots), Window(slots if is_limited else 1024, 0.0)
    seconds, sizes = server.simulate(window, 9000, LENGTHS["uniform"])
    assert 1 <= min(sizes) <= max(sizes) <= FACTOR**2 * FIRST
    assert server.simulate(slots, 9000, LENGTHS["uniform"])[0] / seconds >= 0.95


def test_a_window_that_stopped_too_early_grows_later():
    """The rate does not rise with the first growth, as the rows are longer by then."""
    window, now_s, sizes = Window(1024, 0.0), 0.0, list[int]()
    for _ in range(HELD_EPOCHS + 8):
        size = window.size(now_s)
        for _ in range(3 * size):
            now_s += 1 / min(size, 200) if len(sizes) != 1 else 1 / 16
            window.answered(now_s, 100, num_open=size)
            if window.size(now_s) != size:
                break
        sizes.append(window.size(now_s))
    assert sizes[2] == FACTOR * FIRST
    assert sizes[-1] >= 200


def test_maximum_size_limits_growth():
    _, sizes = SimulatedServer().simulate(Window(50, 0.0), 5000, LENGTHS["constant"])
    assert max(sizes) == sizes[-1] == 50


def test_rows_that_run_out_do_not_change_the_window():
    window = Window(1024, 0.0)
    for second in range(1, 1000):
        window.answered(float(second), 100, num_open=3)
    assert window.size(1000.0) == Window(1024, 0.0).size(0.0)


def test_waiting_requests_shrink_the_window_and_none_grow_it():
    window = Window(1024, 0.0)
    first = window.size(0.0)
    window.add_gauges(running=first, waiting=0, num_open=first)
    grown = window.size(0.0)
    assert grown > first
    window.add_gauges(running=10, waiting=0, num_open=first - 1)  # not full: no reason to grow
    assert window.size(0.0) == grown
    window.add_gauges(running=10, waiting=grown - 10, num_open=grown)
    assert 10 < window.size(0.0) <= 12
    window.add_gauges(running=0, waiting=500, num_open=500)
    assert 1 <= window.size(0.0) <= 2


def test_retry_after_closes_the_window_for_its_time():
    window = Window(1024, 0.0)
    window.overloaded(5.0, 4.0, 30.0, num_open=3)
    assert [window.size(now_s) > 0 for now_s in (5.0, 34.9, 35.1)] == [False, False, True]
    window.overloaded(36.0, 4.5, 10.0, num_open=3)  # sent under the earlier window: only its pause counts
    assert [window.size(now_s) > 0 for now_s in (45.9, 46.1)] == [False, True]


def test_rejections_of_one_burst_count_once_and_repeated_ones_pause_for_longer():
    burst, single = Window(1024, 0.0), Window(1024, 0.0)
    for _ in range(16):
        burst.overloaded(1.0, 0.5, None, num_open=16)
    single.overloaded(1.0, 0.5, None, num_open=16)
    assert burst.size(2.0) == single.size(2.0) >= 8
    now_s, pauses = 2.0, list[float]()
    for _ in range(20):
        burst.overloaded(now_s, now_s - 1e-3, None, num_open=1)
        begin_s = now_s
        while not burst.size(now_s):
            now_s += 0.01
        pauses.append(now_s - begin_s)
    assert pauses[3] > 2 * pauses[0]
    assert max(pauses) < 11.0
    assert burst.size(now_s) == 1
