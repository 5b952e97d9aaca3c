"""A job's prediction: every token counted, the KV cache never over its room, prefixes shared, tails where they are."""

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.roofline import job_simulation as job_module
from pipeline.roofline.cost_model import AWQ, DENSE, Ceilings, DecoderSize, StepLoad, step_seconds
from pipeline.roofline.job_simulation import Batching, RequestTokens, simulate_job
from pipeline.roofline.kv_pages import KVPages

SIZE = DecoderSize(256, 512, 2, 4, 2, 64, 1000)
CARD = Ceilings("a card", 1e9, 1e12, 1e9)
PAGES = KVPages(16, 0)
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
    found = simulate_job([RequestTokens(100, 3)], SIZE, DENSE, CARD, Batching(8, 64, 64, PAGES))
    lengths = [(64, 64, 0), (36, 100, 1), (1, 101, 1), (1, 102, 1)]  # the third token is drawn and not computed
    steps = [step_seconds(StepLoad(np.array([n]), np.array([c]), rows), SIZE, DENSE, CARD) for n, c, rows in lengths]
    assert found.wall_s == pytest.approx(sum(step.total_s for step in steps))
    assert found.parts.linears_s == pytest.approx(sum(step.linears_s for step in steps))
    assert (found.num_steps, found.prompt_tokens, found.output_tokens) == (4, 100, 3)
    assert found.tokens_per_s == pytest.approx(103 / found.wall_s)


@pytest.mark.parametrize(
    "batching", [Batching(4, 16, 50, PAGES), Batching(64, 4096, 1000, PAGES), Batching(64, 64, 25, KVPages(8, 0))]
)
def test_every_token_is_computed_once_and_within_bounds(batching, steps):
    found = simulate_job(RAGGED, SIZE, AWQ, CARD, batching)
    assert found.prompt_tokens == sum(r.prompt for r in RAGGED)
    assert sum(step.num_tokens for step in steps) == sum(r.prompt + r.output - 1 for r in RAGGED)
    assert sum(step.num_rows for step in steps) == sum(r.output for r in RAGGED)
    assert all(0 < step.num_tokens <= batching.max_num_batched_tokens for step in steps)
    assert all(len(step.count_S) <= batching.max_num_seqs for step in steps)
    assert all(step.context_S.sum() <= batching.pages.max_tokens(batching.num_pages) for step in steps)


def test_a_shared_prefix_is_computed_and_held_once():
    requests = [RequestTokens(200 + n, 4) for n in range(10)]
    batching = Batching(16, 4096, 256, PAGES)
    shared = simulate_job(requests, SIZE, DENSE, CARD, batching, shared_prefix=180)
    apart = simulate_job(requests, SIZE, DENSE, CARD, batching)
    whole = 180 // 16 * 16
    assert apart.prompt_tokens - shared.prompt_tokens == 9 * whole
    assert shared.wall_s < apart.wall_s
    own = 5 * 2 + 5 * 3  # blocks of each one's own, up to 208 tokens and above
    fits, lacks = (Batching(16, 4096, 11 + own - less, PAGES) for less in (0, 1))
    assert simulate_job(requests, SIZE, DENSE, CARD, fits, shared_prefix=180).num_steps == 5
    assert simulate_job(requests, SIZE, DENSE, CARD, lacks, shared_prefix=180).num_steps > 5


def test_a_shared_prefix_is_read_once_a_step_by_all_that_have_it(steps):
    requests = [RequestTokens(200 + n, 4) for n in range(10)]
    params = SIZE, DENSE, CARD, Batching(16, 4096, 256, PAGES), 180, 2.0
    simulate_job(requests, *params)
    whole = 180 // 16 * 16
    # the first one computes the prefix alone; the others join it, and each ends after 4 tokens
    assert [step.spared_tokens // whole for step in steps] == [0, 9, 9, 9, 8]


def test_more_room_is_never_slower_and_a_request_too_large_is_refused():
    by_room = [simulate_job(RAGGED, SIZE, DENSE, CARD, Batching(n, 4096, 1000, PAGES)).wall_s for n in (1, 4, 16, 64)]
    assert by_room == sorted(by_room, reverse=True)
    assert by_room[0] > 4 * by_room[-1]
    with pytest.raises(ConfigError, match="100 prompt and 30 output tokens does not fit into a KV cache"):
        simulate_job([RequestTokens(100, 30)], SIZE, DENSE, CARD, Batching(4, 64, 8, PAGES))
