"""A job's prediction: every token counted, the KV cache never over its room, prefixes shared, tails where they are."""

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.roofline import job_simulation as job_module
from pipeline.roofline.cost_model import AWQ, DENSE, Ceilings, DecoderSize, StepLoad, Weights, step_seconds
from pipeline.roofline.job_simulation import (
    Batching,
    RequestTokens,
    SimulatedMoment,
    job_bytes,
    job_flops,
    kv_room,
    simulate_job,
    tail_seconds,
)

SIZE = DecoderSize(256, 512, 2, 4, 2, 64, 1000)
CARD = Ceilings("a card", 1e9, 1e12, 1e9)
RAGGED = [RequestTokens(int(p), int(o)) for p, o in np.random.default_rng(3).integers(1, 90, (40, 2))]


@pytest.fixture
def steps(monkeypatch) -> list[StepLoad]:
    """Steps that are simulated in a test."""
    seen: list[StepLoad] = []
    monkeypatch.setattr(
        job_module, "step_seconds", lambda tokens, *others: seen.append(tokens) or step_seconds(tokens, *others)
    )
    return seen


def test_one_request_is_the_sum_of_its_steps():
    found = simulate_job([RequestTokens(100, 3)], SIZE, DENSE, CARD, Batching(8, 64, 1024, 16))
    lengths = [(64, 64, 0), (36, 100, 1), (1, 101, 1), (1, 102, 1)]  # the third token is drawn and not computed
    steps = [step_seconds(StepLoad(np.array([n]), np.array([c]), rows), SIZE, DENSE, CARD) for n, c, rows in lengths]
    assert found.wall_s == pytest.approx(sum(step.total_s for step in steps))
    assert found.parts.linears_s == pytest.approx(sum(step.linears_s for step in steps))
    assert (found.num_steps, found.prompt_tokens, found.output_tokens) == (4, 100, 3)
    assert found.kv_used == pytest.approx(7 / 64)  # 103 tokens in blocks of 16
    assert found.sequences == pytest.approx(1.0)
    assert found.output_tokens_per_s == pytest.approx(3 / found.wall_s)


@pytest.mark.parametrize(
    "batching", [Batching(4, 16, 800, 16), Batching(64, 4096, 16_000, 16), Batching(64, 64, 200, 8)]
)
def test_every_token_is_computed_once_and_within_bounds(batching, steps):
    found = simulate_job(RAGGED, SIZE, AWQ, CARD, batching)
    assert found.prompt_tokens == sum(r.prompt for r in RAGGED)
    assert sum(step.num_tokens for step in steps) == sum(r.prompt + r.output - 1 for r in RAGGED)
    assert sum(step.num_rows for step in steps) == sum(r.output for r in RAGGED)
    assert all(0 < step.num_tokens <= batching.max_num_batched_tokens for step in steps)
    assert all(len(step.count_S) <= batching.max_num_seqs for step in steps)
    assert all(step.context_S.sum() <= batching.kv_tokens for step in steps)
    assert 0 < found.kv_used <= 1
    assert 0 < found.tail_s <= found.wall_s


def test_a_shared_prefix_is_computed_and_held_once():
    requests = [RequestTokens(200 + n, 4) for n in range(10)]
    batching = Batching(16, 4096, 4096, 16)
    shared = simulate_job(requests, SIZE, DENSE, CARD, batching, shared_prefix=180)
    apart = simulate_job(requests, SIZE, DENSE, CARD, batching)
    whole = 180 // 16 * 16
    assert apart.prompt_tokens - shared.prompt_tokens == 9 * whole
    assert shared.wall_s < apart.wall_s
    assert shared.kv_used < 0.5 * apart.kv_used
    own = 5 * 2 + 5 * 3  # blocks of each one's own, up to 208 tokens and above
    fits, lacks = (Batching(16, 4096, 16 * (11 + own - less), 16) for less in (0, 1))
    assert simulate_job(requests, SIZE, DENSE, CARD, fits, shared_prefix=180).num_steps == 5
    assert simulate_job(requests, SIZE, DENSE, CARD, lacks, shared_prefix=180).num_steps > 5


def test_a_shared_prefix_is_read_once_a_step_by_all_that_have_it(steps):
    requests = [RequestTokens(200 + n, 4) for n in range(10)]
    params = SIZE, DENSE, CARD, Batching(16, 4096, 4096, 16), 180, 2.0
    once = simulate_job(requests, *params)
    whole = 180 // 16 * 16
    # the first one computes the prefix alone; the others join it, and each ends after 4 tokens
    assert [step.spared_tokens // whole for step in steps] == [0, 9, 9, 9, 8]
    steps.clear()
    each = simulate_job(requests, *params, reads_shared_once=False)
    assert all(step.spared_tokens == 0 for step in steps)
    saved = (9 + 9 + 9 + 8) * whole * SIZE.kv_bytes_per_token() / CARD.bytes_per_s
    assert each.parts.kv_s - once.parts.kv_s == pytest.approx(saved)
    assert each.wall_s > once.wall_s


def test_more_room_is_never_slower_and_a_request_too_large_is_refused():
    by_room = [simulate_job(RAGGED, SIZE, DENSE, CARD, Batching(n, 4096, 16_000, 16)).wall_s for n in (1, 4, 16, 64)]
    assert by_room == sorted(by_room, reverse=True)
    assert by_room[0] > 4 * by_room[-1]
    with pytest.raises(ConfigError, match="100 prompt and 30 output tokens does not fit into a KV cache"):
        simulate_job([RequestTokens(100, 30)], SIZE, DENSE, CARD, Batching(4, 64, 128, 16))


def test_room_is_what_the_weights_leave():
    weights = DENSE.resident_bytes(SIZE)
    assert weights == 2 * (SIZE.linear_parameters + 2 * SIZE.head_parameters)
    assert kv_room(SIZE, DENSE, CARD, 0.5) == int((0.5e9 - weights) // SIZE.kv_bytes_per_token())
    scratch = Weights(int4=True, cached=False)
    assert scratch.resident_bytes(SIZE) < weights < AWQ.resident_bytes(SIZE)
    assert kv_room(SIZE, DENSE, Ceilings("small", 1e9, 1e12, 1e6)) == 0


def test_the_tail_is_when_fewer_than_half_are_left():
    moments = [
        SimulatedMoment(1.0, 9, 4),
        SimulatedMoment(2.0, 5, 4),
        SimulatedMoment(4.0, 2, 4),
        SimulatedMoment(7.0, 1, 2),
        SimulatedMoment(9.0, 0, 1),
    ]
    assert tail_seconds(moments) == 5.0
    assert tail_seconds([SimulatedMoment(2.0, 0, 1)]) == 2.0


def test_a_jobs_work_is_its_steps_work():
    requests = [RequestTokens(5, 3), RequestTokens(2, 1)]
    tokens, rows, keys = 5 + 2 + 2, 4, sum(range(1, 8)) + 1 + 2
    assert job_flops(requests, SIZE) == (
        2 * SIZE.linear_parameters * tokens + 2 * SIZE.head_parameters * rows + 4 * 2 * 4 * 64 * keys
    )
    less = job_flops(requests, SIZE) - job_flops(requests, SIZE, cached_tokens=2)  # one of each request
    assert less == 2 * SIZE.linear_parameters * 2 + 4 * 2 * 4 * 64 * 2
    read = 3 * 2 * (SIZE.linear_parameters + SIZE.head_parameters) + SIZE.kv_bytes_per_token() * (6 + 7)
    assert job_bytes(requests, SIZE, DENSE, num_steps=3) == read
    assert job_bytes(requests, SIZE, AWQ, 3) < read
    alike = [RequestTokens(50, 5)] * 4
    apart, shared = (job_bytes(alike, SIZE, DENSE, 6, shared_prefix=prefix) for prefix in (0, 32))
    assert apart - shared == 32 * (4 * 4 - 6) * SIZE.kv_bytes_per_token()  # read in 6 steps, not for 16 tokens
    assert job_bytes(alike, SIZE, DENSE, 99, shared_prefix=32) == job_bytes(alike, SIZE, DENSE, 99)
    found = simulate_job(RAGGED, SIZE, DENSE, CARD, Batching(64, 4096, 16_000, 16))
    assert found.wall_s >= job_flops(RAGGED, SIZE) / CARD.flops_per_s
    assert found.wall_s >= job_bytes(RAGGED, SIZE, DENSE, found.num_steps) / CARD.bytes_per_s
