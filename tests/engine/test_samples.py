"""Several samples of a row: they equal separate rows with their seeds, and end as one completion."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.completion import Completion
from pipeline.engine.request import Request
from pipeline.engine.samples import sample_seed
from pipeline.engine.sampling_params import SamplingParams
from tests.engine.drafts.proposers import looking_up
from tests.engine.drafts.random_rows import odd_requests
from tests.engine.grammar.small_vocabulary import text_engine
from tests.engine.hash_runner import VOCAB, hash_engine
from tests.engine.schedule.test_scheduler import run
from tests.engine.step.test_out_of_memory import context_of, fail_if


def requests_of(seed: int, count: int = 20) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        replace(r, params=replace(r.params, n=int(rng.integers(1, 6)) if r.params.temperature else 1))
        for r in odd_requests(rng, count, 64)
    ]


def apart(requests: Iterable[Request]) -> list[Request]:
    """Return each sample as a separate request; row_id: row and sample."""
    return [
        replace(
            request,
            row_id=(request.row_id, index),
            params=replace(request.params, n=1, seed=sample_seed(request.params.seed or 0, index)),
        )
        for request in requests
        for index in range(request.params.n)
    ]


def result_of(completion: Completion) -> tuple:
    return completion.token_ids, completion.text, completion.finish_reason, completion.error, completion.logprobs


def check_samples(done: dict[int, Completion], requests: list[Request], memory: int | None = None) -> None:
    """Assert that samples equal separate requests of an engine that has room for all."""
    expected = run(hash_engine(400, 4, memory=memory), apart(requests))
    for request in requests:
        completion, n = done[request.row_id], request.params.n  # type: ignore[index]
        assert len(completion.samples) == (n if n > 1 else 0)
        assert [result_of(one) for one in completion.each] == [result_of(expected[request.row_id, i]) for i in range(n)]  # type: ignore[index]
        assert result_of(completion) == result_of(completion.each[0])
        assert completion.num_generated_tokens == sum(len(one.token_ids) for one in completion.each)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_samples_are_those_of_separate_rows_with_their_seeds(seed: int, is_asynchronous: bool) -> None:
    requests = requests_of(seed)
    engine = hash_engine(120, 4, is_asynchronous=is_asynchronous, max_num_batched_tokens=8)
    done = run(engine, requests, arrivals=np.random.default_rng(seed))
    check_samples(done, requests)
    assert engine.stats.generated_tokens == sum(c.num_generated_tokens for c in done.values())
    assert engine.stats.cached_tokens == sum(one.num_cached_tokens for c in done.values() for one in c.each)


def test_samples_survive_preemptions_and_steps_that_do_not_fit_the_memory() -> None:
    rng = np.random.default_rng(5)
    requests = requests_of(5)
    engine = hash_engine(20, 4, max_num_seqs=8, max_num_batched_tokens=16)
    engine.scheduler.admission.expected_output, engine.scheduler.admission.min_history = 1, 1000
    failed = fail_if(engine, lambda step: len(step.token_id_T) > 2 and rng.random() < 0.1)
    check_samples(run(engine, requests), requests)
    assert engine.stats.num_preemptions > 2
    assert len(failed) > 2


def test_samples_with_drafts_are_those_without() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.15, n=3, ignore_eos=True)
    requests = [Request(row, [row, 5, 6], replace(params, seed=row)) for row in range(5)]
    engine = looking_up(hash_engine(200, 4, memory=2, max_num_batched_tokens=64))
    check_samples(run(engine, requests), requests, memory=2)
    assert engine.stats.accepted_by_position[0] > 20


def test_a_prompt_is_computed_once_and_its_full_blocks_are_shared() -> None:
    engine = hash_engine(120, 4, max_num_seqs=8, max_num_batched_tokens=32)
    prompt = list(range(1, 24))  # 5 full blocks and 3 tokens
    (done,) = run(engine, [Request(0, prompt, SamplingParams(max_tokens=4, temperature=1.0, n=8))]).values()
    assert [one.num_cached_tokens for one in done.samples] == [0] + 7 * [20]
    computed = engine.stats.prompt_tokens - engine.stats.cached_tokens
    assert computed == 23 + 7 * 3
    assert sum(engine.runner.tokens_per_step[:2]) <= 23 + 7 * 3 + 1  # type: ignore[attr-defined]


def test_many_samples_of_many_rows_run_at_once() -> None:
    """Those that wait for their prompt do not keep other rows out."""
    engine = hash_engine(400, 4, max_num_seqs=40, max_num_batched_tokens=400)
    params = SamplingParams(max_tokens=8, temperature=1.0, n=20, ignore_eos=True)
    for row in range(2):
        engine.add(Request(row, [row, *range(10)], params))
    engine.step()
    engine.step()
    assert len(engine.scheduler.running) == 40


def test_the_first_sample_has_the_rows_own_seed_and_no_two_have_the_same() -> None:
    assert sample_seed(17, 0) == 17
    seeds = {sample_seed(seed, index) for seed in range(50) for index in range(20)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(17, 1) == 5_111_772_343_852_295_760  # outputs depend on it: it is never to change


def test_requests_without_a_seed_take_the_engines_and_their_position() -> None:
    prompts, params = [[1, 2], [3, 4]], SamplingParams(max_tokens=6, temperature=1.0, n=3)
    both = hash_engine(120, 4, seed=40).generate(prompts, params)
    for position, completion in enumerate(both):
        alone = Request(0, prompts[position], replace(params, seed=40 + position))
        check_samples({0: completion}, [alone])


# -- ends


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_aborted_row_or_stream_takes_all_its_samples_along_and_no_other(is_asynchronous: bool) -> None:
    engine = hash_engine(120, 4, max_num_seqs=5, is_asynchronous=is_asynchronous)
    params = SamplingParams(temperature=1.0, n=4)
    requests = [Request(row, [row, 5], replace(params, max_tokens=3 + row, seed=row)) for row in range(4)]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    assert engine.abort(2)
    assert not engine.abort(2)
    done = run(engine, [])
    assert 2 not in done
    check_samples(done, [request for request in requests if request.row_id in done])
    stream = engine.stream([Request(row, [row, 5], requests[0].params) for row in range(9)])
    next(stream)
    stream.close()
    assert not engine.has_unfinished
    assert (engine.pool.num_held, engine.table.num_free_slots) == (0, 5)


def test_a_row_whose_samples_never_fit_the_memory_is_one_error_row_and_ends_nobody_else() -> None:
    """All of its samples are suspects at once: they tell no more than one would."""
    engine = hash_engine(120, 4, max_num_seqs=16, max_num_batched_tokens=64)
    params = SamplingParams(max_tokens=6, temperature=1.0, n=6, seed=3)
    requests = [Request(row, [row, 5, 6, 7, 8, 9], params) for row in range(3)]

    def holds_row_1(step: object) -> bool:
        return any(context_of(engine, step, s)[0] == 1 for s in range(len(step.context_len_S)))  # type: ignore[arg-type, attr-defined]

    fail_if(engine, holds_row_1)
    done = run(engine, requests)
    assert (done[1].error, done[1].samples) == ("out_of_memory", ())
    check_samples({row: done[row] for row in (0, 2)}, [requests[0], requests[2]])


def test_one_sample_that_fails_makes_an_error_row_that_counts_all_that_was_computed() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=8, seed=1, ignore_eos=True)
    prompt = [1, 2, 3, 4, 5]
    expected = run(hash_engine(120, 4), apart([Request(0, prompt, params)]))
    bad = next(t for t in expected[0, 3].token_ids[:6] if sum(t in one.token_ids for one in expected.values()) < 4)  # type: ignore[index]
    engine = hash_engine(120, 4, bad_token=bad, max_num_seqs=8)
    (done,) = run(engine, [Request(0, prompt, params)]).values()
    assert (done.error, done.token_ids, done.samples) == ("non_finite_logits", [], ())
    failed = next(i for i in range(8) if bad in expected[0, i].token_ids[:-1])  # type: ignore[index]
    assert (done.error_message or "").startswith(f"sample {failed} of 8: the model returned non-finite logits")
    assert done.num_lost_generated_tokens == engine.stats.generated_tokens
    assert done.num_lost_prompt_tokens == engine.stats.prompt_tokens - engine.stats.cached_tokens


def test_a_prompt_that_cannot_be_served_is_one_error_without_a_samples_number() -> None:
    params = SamplingParams(temperature=1.0, n=3)
    done = run(hash_engine(120, 4), [Request(0, [], params), Request(1, [VOCAB], params)])
    assert [done[row].error for row in range(2)] == ["empty_prompt", "token_out_of_vocabulary"]
    assert not any("sample" in (done[row].error_message or "") for row in range(2))


def test_samples_keep_to_a_grammar_and_one_that_cannot_be_kept_makes_one_error_row() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, n=4, seed=2)
    regex = {"fine": "[a-c]{3}", "never": "é+"}
    rows = [Request(name, [7, 8], replace(params, structured_outputs={"regex": r})) for name, r in regex.items()]
    done = run(text_engine(), rows)
    texts = [one.text for one in done["fine"].samples]  # type: ignore[index]
    assert len(set(texts)) > 1
    assert all(len(text) == 3 and set(text) <= set("abc") for text in texts)
    assert done["never"].error == "grammar_error"  # type: ignore[index]
