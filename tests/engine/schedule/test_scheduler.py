"""The scheduler on a model whose tokens expose every mistake: see hash_runner."""

import time
from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.completion import Completion
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepTokens
from pipeline.engine.stats import EngineStats
from pipeline.engine.tasks import Choice
from tests.engine.hash_runner import LAYERS, VOCAB, check_tokens, expected_tokens, hash_engine, tight_engine


def random_requests(rng: np.random.Generator, count: int, max_len: int) -> list[Request]:
    """Draw requests of any length that often share a prefix, with ragged budgets."""
    stems = [rng.integers(0, VOCAB - 1, int(rng.integers(1, 30))).tolist() for _ in range(3)]
    requests = []
    for row in range(count):
        stem = stems[int(rng.integers(3))] if rng.random() < 0.6 else []
        own = rng.integers(0, VOCAB - 1, int(rng.integers(1, 25))).tolist()
        prompt = (stem + own)[: max_len - 1]
        params = SamplingParams(max_tokens=int(rng.integers(1, 40)), ignore_eos=bool(rng.random() < 0.5))
        requests.append(Request(row, prompt, params))
    return requests


def run(
    engine, requests: list[Request], check: bool = True, arrivals: np.random.Generator | None = None
) -> dict[int, Completion]:
    """Step to the end while requests arrive at random times; check every invariant after every step."""
    queue = list(requests)
    done: dict[int, Completion] = {}
    steps = 0
    while queue or engine.has_unfinished:
        arrive = len(queue) if arrivals is None else int(arrivals.integers(0, 4))
        for request in queue[:arrive]:
            engine.add(request)
        del queue[:arrive]
        for completion in engine.step():
            assert completion.row_id not in done, "a request finished twice"
            done[completion.row_id] = completion
        if check:
            engine.pool.check()
            table, size = engine.table, engine.pool.block_size
            for slot in engine.scheduler.running:
                known, computed = int(table.num_known[slot]), int(table.num_computed[slot])
                assert 0 <= computed <= known <= int(table.limit[slot])
                assert computed < known or engine.runner.is_asynchronous, "no step computes its next token"
                held = int(table.num_pages[slot]) * size
                assert computed <= held < computed + size + 1, "more than one partial block is wasted"
                if table.pages.window is not None:
                    pages = table.pages_of(slot)
                    assert len(pages) == len(set(pages))
                    newest = known if engine.runner.is_asynchronous else computed
                    most = table.pages.num_pages(newest, max(engine.runner.tokens_per_step))
                    assert len(pages) <= most, "a window keeps blocks that no query sees"
        steps += 1
        assert steps < 20_000, "no progress"
    assert engine.pool.num_held == 0
    return done


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_tokens_survive_any_mix_of_sharing_chunking_and_preemption(
    seed: int, is_asynchronous: bool, layers: str
) -> None:
    rng = np.random.default_rng(seed)
    max_len = int(rng.choice([40, 64]))
    engine = tight_engine(rng, max_len, layers, is_asynchronous=is_asynchronous)
    requests = random_requests(rng, 40, max_len)
    done = run(engine, requests, arrivals=rng)
    check_tokens(done, requests, max_len)
    assert max(engine.runner.tokens_per_step) <= engine.scheduler.max_num_batched_tokens
    fresh = sum(len(r.prompt_token_ids) for r in requests)
    assert engine.stats.prompt_tokens == fresh
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for c in done.values())
    assert engine.stats.cached_tokens == sum(c.num_cached_tokens for c in done.values())


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_prompts_stay_cached_for_follow_ups_that_arrive_some_steps_later(
    seed: int, is_asynchronous: bool, has_window: bool
) -> None:
    """The pool is too small for the rows that wait, and for some that run. Some rows have no follow-up after all."""
    rng = np.random.default_rng(seed)
    engine = tight_engine(rng, 64, has_window, is_asynchronous=is_asynchronous)
    requests = [replace(r, expects_follow_up=True) for r in random_requests(rng, 40, 30)]
    later: list[tuple[int, Request]] = []
    done: dict[object, Completion] = {}
    for request in requests:
        engine.add(request)
    for step in range(20_000):
        if not engine.has_unfinished and not later:
            break
        for completion in engine.step():
            done[completion.row_id] = completion
            if isinstance(completion.row_id, int) and completion.row_id % 4:
                first = requests[completion.row_id]
                prompt = [*first.prompt_token_ids, *rng.integers(0, VOCAB - 1, 5).tolist()]
                later.append((step + 3, Request((completion.row_id,), prompt, first.params, is_follow_up=True)))
        engine.pool.check()
        while later and (later[0][0] <= step or not engine.has_unfinished):
            engine.add(later[0][1])
            requests.append(later.pop(0)[1])
    check_tokens(done, requests, 64)
    assert len(done) == len(requests) == 70
    engine.scheduler.held.release_all()
    engine.pool.check()
    assert engine.pool.num_held == 0


@pytest.mark.parametrize("num_blocks", [16, 18])
def test_a_prefix_longer_than_the_window_is_computed_once_in_a_full_pool(num_blocks: int) -> None:
    """Running rows release its last pages in layers with a window long before the next row begins."""
    rng = np.random.default_rng(0)
    stem, requests = rng.integers(0, VOCAB - 1, 40).tolist(), []
    for row in range(30):
        params = SamplingParams(max_tokens=int(rng.integers(4, 20)), ignore_eos=True)
        requests.append(Request(row, stem + rng.integers(0, VOCAB - 1, 4).tolist(), params))
    engine = hash_engine(num_blocks, window=12, blocks_per_page=2, max_num_seqs=8, max_num_batched_tokens=64)
    check_tokens(run(engine, requests), requests)
    assert engine.stats.num_preemptions == 0
    assert engine.stats.prompt_tokens - engine.stats.cached_tokens == 40 + 4 * len(requests)


def test_the_prompts_of_a_full_pool_are_held_for_follow_ups_until_running_rows_need_the_blocks() -> None:
    engine = hash_engine(34, 4, max_model_len=64, max_num_seqs=8)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [[row, *range(3, 34)] for row in range(40)]
    late: list[tuple[int, Request]] = []
    cached: list[int] = []
    for row, prompt in enumerate(prompts):
        engine.add(Request(row, prompt, params, expects_follow_up=True))
    for step in range(1000):
        for done in engine.step():
            if isinstance(done.row_id, int):
                late.append((step + 3, Request((done.row_id,), [*prompts[done.row_id], 1], params, is_follow_up=True)))
            else:
                cached.append(done.num_cached_tokens)
        while late and late[0][0] <= step:
            engine.add(late.pop(0)[1])
        if len(cached) == len(prompts):
            break
    assert cached == [32] * len(prompts)


def test_preemption_is_counted_as_repeated_work_and_completions_have_their_times() -> None:
    engine = hash_engine(17, 4, max_model_len=64, max_num_seqs=8, enable_prefix_caching=False)
    engine.scheduler.admission.expected_output = 1  # expects far too little, so that it admits far too much
    requests = [Request(row, [row, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True)) for row in range(8)]
    before = time.monotonic_ns() // 1000
    for request in requests:
        engine.add(request)
    added = time.monotonic_ns() // 1000
    done: dict[object, Completion] = {}
    first_seen: dict[object, int] = {}
    while engine.has_unfinished:
        done |= {c.row_id: c for c in engine.step()}
        for sequence in filter(None, engine.table.sequences):
            row, first = sequence.request.row_id, sequence.first_token_us
            assert first == 0 or first_seen.setdefault(row, first) == first
    check_tokens(done, requests)
    stats = engine.stats
    assert min(stats.num_preemptions, stats.recomputed_tokens) > 0
    assert sum(engine.runner.tokens_per_step) == (
        stats.prompt_tokens + stats.recomputed_tokens + stats.generated_tokens - len(requests)
    )
    for row, completion in done.items():
        assert before <= completion.queued_us <= added <= completion.first_token_us < completion.last_token_us
        assert completion.first_token_us == first_seen[row]
        assert completion.last_token_us <= time.monotonic_ns() // 1000


def test_the_time_of_a_step_is_divided_among_its_tokens_and_none_is_lost() -> None:
    stats = EngineStats()
    StepTokens(prefill=30, decode=50, repeated=20).add_time(stats, 1001, only_samples=False, num_rejected=10)
    assert (stats.prefill_us, stats.drafts_us, stats.preempted_us, stats.decode_us) == (300, 100, 200, 401)
    assert (stats.step_us, stats.plain_steps) == (1001, 0)
    StepTokens(0, 4, 0).add_time(stats, 100, only_samples=True)
    assert (stats.step_us, stats.plain_steps, stats.plain_rows, stats.plain_us) == (1101, 1, 4, 100)
    StepTokens(0, 4, 0).add_time(stats, 100, only_samples=False, num_rejected=9)  # of the step before, a larger one
    assert (stats.step_us, stats.drafts_us, stats.decode_us) == (1201, 200, 501)


def test_a_sequence_that_alone_outgrows_the_cache_is_an_error_and_others_live() -> None:
    engine = hash_engine(6, 4, max_model_len=64)
    long = Request("long", [1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    never = Request("never", list(range(30)), SamplingParams(max_tokens=1))
    short = Request("short", [4, 5], SamplingParams(max_tokens=3, ignore_eos=True))
    done = run(engine, [long, never, short])
    assert done["long"].error == "kv_cache_exhausted"
    assert done["never"].error == "kv_cache_exhausted"
    assert done["short"].token_ids == expected_tokens([4, 5], 3, 64, False)


def test_numbers_beyond_64_bits_are_accepted() -> None:
    """A row's column or line of a batch API may contain them."""
    huge = 10**20
    rows = [
        SamplingParams(max_tokens=huge, min_tokens=huge),
        SamplingParams(max_tokens=2**63 - 1, min_tokens=2**63 - 1),
        SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=[huge, VOCAB]),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=huge, seed=huge),
    ]
    engine = hash_engine(60)
    done = engine.generate([[1, 2, row] for row in range(4)], rows)
    assert [completion.error for completion in done] == [None] * 4
    assert [len(completion.token_ids) for completion in done[:2]] == [61, 61], "to the end of the context"
    assert done[2].token_ids == expected_tokens([1, 2, 2], 9, 64, eos=True)
    assert engine.pool.num_held == 0


def test_a_shared_prompt_is_computed_once_even_by_requests_that_arrive_together() -> None:
    engine = hash_engine(64, 4, max_num_seqs=8, max_num_batched_tokens=64)
    system = list(range(40))
    requests = [Request(row, [*system, row + 50], SamplingParams(max_tokens=4, ignore_eos=True)) for row in range(8)]
    done = run(engine, requests)
    assert [done[row].num_cached_tokens for row in range(8)] == [0] + [40] * 7
    assert sum(engine.runner.tokens_per_step) == 41 + 7 + 8 * 3
    check_tokens(done, requests)


@pytest.mark.parametrize("stems", [(30,), (30, 57)], ids=["one prefix", "a prefix in a prefix"])
def test_states_are_copied_at_the_ends_of_prefixes(stems: tuple[int, ...]) -> None:
    """A chunk is shorter than the prefix. Each row computes what follows the last whole page of what it shares."""
    engine = hash_engine(256, 4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, has_states=True)
    stem = list(range(max(stems)))
    prompts = [[*stem[:length], 90, row] for length in stems for row in range(5)]
    requests = [Request(row, prompt, SamplingParams(max_tokens=1)) for row, prompt in enumerate(prompts)]
    check_tokens(run(engine, requests), requests, 128)
    whole_pages = [length // 4 * 4 for length in stems]
    of_rows = sum(len(prompt) for prompt in prompts) - 5 * sum(whole_pages)
    assert sum(engine.runner.tokens_per_step) == whole_pages[-1] + of_rows


def test_labels_of_a_model_with_states_are_computed_after_one_prompt() -> None:
    engine = hash_engine(64, 4, max_num_batched_tokens=16, has_states=True)
    labels = ((3, 4), (5, 6), (5, 7, 8))
    done = run(engine, [Request(0, list(range(30)), SamplingParams(), task=Choice(labels))])
    assert done[0].error is None
    assert sum(engine.runner.tokens_per_step) == 30 + len((3,)) + len((5, 7))


def test_generated_tokens_are_shared_neither_before_the_end_nor_after() -> None:
    """Their blocks are reused first, so that those of prompts stay."""
    engine = hash_engine(64, 4, max_num_seqs=8, max_num_batched_tokens=64)
    first = Request("first", list(range(10)), SamplingParams(max_tokens=11, ignore_eos=True))
    text = run(engine, [first])["first"].token_ids
    turn = [*first.prompt_token_ids, *text]  # 21 tokens: two blocks of the prompt, three that were generated
    again = run(engine, [Request("again", [*turn, 1, 2], SamplingParams(max_tokens=3, ignore_eos=True))])["again"]
    assert again.num_cached_tokens == 8
    assert again.token_ids == expected_tokens([*turn, 1, 2], 3, 64, False)

    engine.add(Request("long", list(range(30, 40)), SamplingParams(max_tokens=50, ignore_eos=True)))
    for _ in range(14):
        engine.step()
    known = engine.table.token_ids[int(engine.scheduler.running[0]), :23].tolist()
    engine.add(Request("second", known, SamplingParams(max_tokens=3, ignore_eos=True)))
    done = run(engine, [])
    assert done["second"].num_cached_tokens == 8, "blocks of the prompt are shared at once"
    assert done["second"].token_ids == expected_tokens(known, 3, 64, False)


def test_a_preempted_sequence_finds_what_it_generated() -> None:
    engine = hash_engine(64, 4, max_num_seqs=8, max_num_batched_tokens=64)
    engine.add(Request(0, [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.add(Request(1, [4, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(20):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running)
    done = run(engine, [])
    assert engine.stats.num_preemptions == 1
    assert engine.stats.recomputed_tokens < 4, "only its last block, which was not full"
    assert done[1].token_ids == expected_tokens([4, 5, 6], 40, 64, False)


def test_a_deferred_sequence_runs_when_the_one_computing_its_prefix_is_aborted() -> None:
    engine = hash_engine(64, 4, max_num_batched_tokens=8)
    prompt = list(range(40))
    for row in range(2):
        engine.add(Request(row, [*prompt, row], SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.step()
    assert engine.abort(0)
    assert not engine.abort(0)
    done = run(engine, [])
    assert done[1].token_ids == expected_tokens([*prompt, 1], 2, 64, False)


def test_stream_keeps_only_a_bounded_number_of_requests_ahead() -> None:
    engine = hash_engine(64, 4, max_num_seqs=2)
    num_pulled = 0

    def source():
        nonlocal num_pulled
        for row in range(100):
            num_pulled += 1
            yield Request(row, [row % 90, 3], SamplingParams(max_tokens=2, ignore_eos=True))

    first = next(iter(engine.stream(source())))
    assert first.token_ids
    assert num_pulled <= 8
