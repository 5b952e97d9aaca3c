"""Admission of waiting rows by the lengths of finished ones, on a scheduler without a model."""

import numpy as np
import pytest

from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.admission import Admission, BlockDemand
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.engine.stats import EngineStats
from pipeline.roofline.kv_pages import KVPages

SIZE = 4


class Job:
    """Rows of given prompts and outputs, all queued at the beginning. shared: common prompt tokens."""

    def __init__(
        self,
        prompts: list[int],
        outputs: list[int],
        max_tokens: int,
        num_blocks: int,
        num_slots: int = 64,
        shared: int = 0,
        size: int = SIZE,
    ) -> None:
        self.table = SlotTable(num_slots, max(prompts) + max_tokens, KVPages(size, 0))
        self.pool, self.stats = BlockPool(num_blocks, size), EngineStats()
        self.scheduler = Scheduler(self.table, self.pool, self.stats, 4096, enable_prefix_caching=True)
        self.ends, self.ended, self.computed = np.add(prompts, outputs), [], 0
        for row, prompt in enumerate(prompts):
            token_ids = row * 1000 + np.arange(prompt, dtype=np.int32)
            token_ids[:shared] = np.arange(shared)
            request = Request(row, token_ids.tolist(), SamplingParams(max_tokens=max_tokens))
            self.scheduler.add(Sequence(request, token_ids, row))

    def step(self) -> None:
        scheduler, table = self.scheduler, self.table
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan)
        slot_S = plan.sampling_slot_S
        scheduler.append(slot_S, table.num_known[slot_S])
        ended = slot_S[table.num_known[slot_S] >= self.ends[table.order[slot_S]]].tolist()
        self.ended += [sequence.order for sequence in scheduler.finish(ended)]
        self.computed += plan.num_tokens

    def running(self) -> int:
        return len(self.scheduler.running)


def test_until_some_have_finished_each_row_has_room_for_its_max_tokens() -> None:
    job = Job([8] * 80, [8] * 80, max_tokens=32, num_blocks=33)
    job.step()
    assert job.running() == 3  # of 10 blocks each, and half an empty one, in the end
    while len(job.ended) < Admission.min_history:
        assert job.running() <= 3
        job.step()
    for _ in range(6):
        job.step()
    assert job.scheduler.admission.expected_output == 8
    assert job.running() > 5
    job.scheduler.admission.forget_lengths()
    assert job.scheduler.admission.expected_output is None


def test_rows_that_end_at_other_times_use_the_same_blocks() -> None:
    """Their ends together need 5 blocks each; but when one has 5, another has 2."""
    job = Job([4] * 200, [12, 16, 14, 10] * 50, max_tokens=16, num_blocks=50)
    max_running = 0
    while len(job.ended) < 150:
        job.step()
        if len(job.ended) > 60:
            max_running = max(max_running, job.running())
    assert max_running * 5 > 55
    assert job.stats.num_preemptions <= 2


@pytest.mark.parametrize("seed", range(8))
def test_every_row_ends_once_whatever_was_expected(seed: int) -> None:
    """Rows are conserved and none starves; the oldest one always advances; only lost tokens are recomputed."""
    rng = np.random.default_rng(seed)
    count = 120
    prompts = rng.integers(1, 40, count)
    outputs = np.where(rng.random(count) < 0.7, rng.integers(1, 6, count), rng.integers(20, 90, count))
    shared = int(rng.choice([0, 12]))
    prompts = prompts + shared
    blocks = -(-142 // SIZE) + int(rng.integers(0, 80))
    job = Job(prompts.tolist(), outputs.tolist(), 90, blocks, int(rng.integers(2, 40)), shared)
    steps = 0
    while len(job.ended) < count:
        oldest = int(job.scheduler.running[0]) if job.running() else None
        before = None if oldest is None else (int(job.table.order[oldest]), int(job.table.num_computed[oldest]))
        job.step()
        if oldest is not None and before is not None and before[0] not in job.ended:
            assert job.table.order[oldest] == before[0], "the oldest row was preempted"
            assert job.table.num_computed[oldest] > before[1], "the oldest row did not advance"
        job.pool.check()
        steps += 1
        assert steps < 20_000, "no progress"
    assert sorted(job.ended) == list(range(count))
    assert job.pool.num_held == 0
    assert (
        job.computed
        == job.stats.prompt_tokens - job.stats.cached_tokens + job.stats.recomputed_tokens + sum(outputs) - count
    )


def test_found_blocks_are_counted_once() -> None:
    """All rows share 40 of 44 prompt tokens: 10 blocks once, and some of each row's own."""
    job = Job([44] * 30, [8] * 30, max_tokens=8, num_blocks=43, shared=40)
    job.step()
    assert job.running() == 1  # the others wait for the prefix that it computes
    job.step()
    # It holds 12 blocks now, and will use 1.5 more in 7 tokens. The others will use 1.5 and those of 7 tokens by then.
    assert job.running() == 1 + (43 - 12 - 1.5) // (1.5 + 7 / 4) == 10


def test_blocks_that_are_needed_at_once_are_free() -> None:
    """17 tokens need 2 blocks of 16 and are forecast to hold 1.6 on average, so 12 of them in 20 blocks."""
    job = Job([17] * 30, [1] * 30, max_tokens=1, num_blocks=20, size=16)
    job.step()
    assert (len(job.ended), job.stats.num_preemptions) == (10, 0)


# -- the peak of the blocks that sequences hold, against a count of each step to the end


def counted_peak(known_S, end_S, held_S, freed_S, size: int) -> float:
    """Count step by step: a running sequence holds its tokens' blocks and half a block; an ended one freed its own."""
    peak = -np.inf
    for steps in range(1, int((end_S - known_S).max(initial=1)) + 1):
        runs_S = np.maximum(end_S - known_S, 1) >= steps
        peak = max(peak, np.where(runs_S, (known_S + steps) / size + 0.5 - held_S, -freed_S).sum())
    return float(peak)


def draw_sequences(rng: np.random.Generator, count: int, size: int):
    known_S = rng.integers(1, 60, count)
    end_S = known_S + 2 + rng.permutation(80)[:count]  # each at another step
    end_S[:1] = known_S[:1] - 3  # has passed
    held_S = -(-known_S // size)
    return known_S, end_S, held_S, held_S - rng.integers(0, held_S + 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_the_maximum_over_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 4, 16]))
    sequences = draw_sequences(rng, int(rng.integers(1, 12)), size)
    assert BlockDemand.from_sequences(KVPages(size, 0), *sequences).peak == pytest.approx(
        counted_peak(*sequences, size)
    )


@pytest.mark.parametrize("seed", range(20))
def test_added_sequences_count_like_initial_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, count = int(rng.choice([1, 4, 16])), int(rng.integers(0, 6))
    known_S, end_S, held_S, freed_S = draw_sequences(rng, count + 4, size)
    held_S[count:], freed_S[count:] = rng.integers(0, held_S[count:] + 1), 0  # shared, so not free after its end
    demand = BlockDemand.from_sequences(
        KVPages(size, 0), known_S[:count], end_S[:count], held_S[:count], freed_S[:count]
    )
    for s in range(count, count + 4):
        demand = demand.add(int(known_S[s]), int(end_S[s]), int(held_S[s]))
        sequences = known_S[: s + 1], end_S[: s + 1], held_S[: s + 1], freed_S[: s + 1]
        whole = BlockDemand.from_sequences(KVPages(size, 0), *sequences)
        assert demand.peak == pytest.approx(whole.peak) == pytest.approx(counted_peak(*sequences, size))


def test_if_several_end_at_once_the_peak_is_no_less_and_hardly_more() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        known_S, end_S, held_S, freed_S = draw_sequences(rng, 8, 16)
        end_S = known_S + rng.integers(1, 4, 8)
        found = BlockDemand.from_sequences(KVPages(16, 0), known_S, end_S, held_S, freed_S).peak
        counted = counted_peak(known_S, end_S, held_S, freed_S, 16)
        assert counted - 1e-6 <= found <= counted + 8 * 0.5
