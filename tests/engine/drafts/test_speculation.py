"""Drafts change how fast tokens come and nothing else: see hash_runner for the model that gives away every mistake."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts, Offer, StepFacts, StepOutcome
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.params import Completion, Request, SamplingParams
from pipeline.engine.schedule.block_pool import ROOT, chain_hashes
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import ConfigError
from pipeline.kernels.cpu.layer_loop import CompiledDecodeSteps
from tests.engine.drafts.proposers import Certain, Recorded
from tests.engine.hash_runner import EOS, VOCAB, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run
from tests.engine.step.test_out_of_memory import fail_where
from tests.model_folders import Family, make_family
from tests.parity.harness import LOGIT_TOLERANCE, float32_engine


class Watched(FixedDrafts):
    """A fixed policy that keeps what it is told, and skips looking now and then."""

    def __init__(self, max_draft_tokens: int, rng: np.random.Generator, table: SlotTable) -> None:
        super().__init__(max_draft_tokens)
        self.rng, self.table = rng, table
        self.outcomes: list[StepOutcome] = []
        self.wanted = False

    def select(self, facts: StepFacts) -> int | None:
        self.wanted = bool(self.rng.random() < 0.9)
        return 0 if self.wanted else None

    def depths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        assert self.wanted
        assert len(offer.slot_S) == facts.num_sequences
        assert facts.room >= 0 <= facts.num_prefill
        assert (offer.count_S < self.table.limit[offer.slot_S] - self.table.num_known[offer.slot_S]).all()
        return super().depths(facts, offer)

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.verdict is not None:
            assert (outcome.verdict.accepted_D <= outcome.verdict.drafted_D).all()
            assert (outcome.verdict.drafted_D > 0).all()
        self.outcomes.append(outcome)

    def total(self, name: str) -> int:
        return sum(int(getattr(o.verdict, name).sum()) for o in self.outcomes if o.verdict is not None)


def check_blocks(engine: Engine, texts: list[list[int]]) -> None:
    """Every block that can be found holds what its hash stands for, and that is part of a text that is known for sure;
    every block of a sequence holds its confirmed tokens."""
    size, cache = engine.pool.block_size, engine.runner.cache  # type: ignore[attr-defined]
    sound = {}
    for text in texts:
        whole = np.array(text[: len(text) // size * size], dtype=np.int32)
        sound |= dict(zip(chain_hashes(ROOT, whole, size), whole.reshape(-1, size).tolist()))
    for key, block in engine.pool._block_of.items():
        assert cache[block].tolist() == sound[key]
    for sequence in filter(None, engine.table.sequences):
        computed = int(engine.table.num_computed[sequence.slot])
        held = cache[engine.table.blocks_of(sequence.slot)].reshape(-1)[:computed]
        assert held.tolist() == engine.table.token_ids[sequence.slot, :computed].tolist()


def odd_requests(rng: np.random.Generator, count: int, max_len: int) -> list[Request]:
    """Requests with every kind of option, and stop strings that their texts come to."""
    kinds = [
        {},
        {},
        {"temperature": 0.15},
        {"temperature": 0.2, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logprobs": 2},
        {"temperature": 0.15, "logprobs": 0, "min_p": 0.01, "repetition_penalty": 1.1},
        {"min_tokens": 6, "stop_token_ids": tuple(range(0, 40))},
        {"stop": (" 3", "7 1")},
        {"stop": (" 3",), "min_tokens": 5, "temperature": 0.15},
    ]
    return [
        replace(r, params=replace(r.params, seed=row, **kinds[int(rng.integers(len(kinds)))] | _fitting(r.params)))
        for row, r in enumerate(random_requests(rng, count, max_len))
    ]


def _fitting(params: SamplingParams) -> dict[str, int]:
    return {"max_tokens": max(params.max_tokens, 6)}


def same(ours: Mapping[object, Completion], plain: Mapping[object, Completion]) -> bool:
    """Equal but for times and shared prefixes; log-probabilities to rounding."""
    assert ours.keys() == plain.keys()
    for row, expected in plain.items():
        mine = ours[row]
        for name in ("token_ids", "text", "finish_reason", "error", "num_prompt_tokens"):
            assert getattr(mine, name) == getattr(expected, name)
        assert (mine.logprobs is None) == (expected.logprobs is None)
        for a, b in zip(mine.logprobs or [], expected.logprobs or [], strict=True):
            assert (a.token_id, [token for token, _ in a.top]) == (b.token_id, [token for token, _ in b.top])
            assert [a.logprob, *(v for _, v in a.top)] == pytest.approx([b.logprob, *(v for _, v in b.top)], abs=1e-4)
    return True


def tight_engine(rng: np.random.Generator, max_len: int, memory: int | None) -> Engine:
    size = int(rng.choice([1, 3, 4, 8]))
    return hash_engine(
        -(-max_len // size) + int(rng.integers(0, 3 * max_len // size)),
        size,
        memory=memory,
        max_model_len=max_len,
        max_num_seqs=int(rng.integers(1, 9)),
        max_num_batched_tokens=int(rng.integers(9, 60)),
        enable_prefix_caching=bool(rng.random() < 0.8),
    )


def roomy_engine(max_len: int, memory: int | None) -> Engine:
    return hash_engine(400, 4, memory=memory, max_model_len=max_len, max_num_seqs=16, max_num_batched_tokens=200)


@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_any_mix_are_those_of_plain_steps(seed: int) -> None:
    """Sharing, chunks, preemption, tiny caches, all options, drafts that are right, wrong and both."""
    rng = np.random.default_rng(seed)
    max_len = int(rng.choice([40, 64]))
    requests = odd_requests(rng, 40, max_len)
    plain = run(roomy_engine(max_len, None), requests, check=False)
    engine = tight_engine(rng, max_len, None)
    outputs = {row: completion.token_ids for row, completion in plain.items()}
    proposer = Recorded(engine.table, outputs, rng, error_rate=float(rng.choice([0.0, 0.1, 0.5])))
    policy = Watched(int(rng.integers(1, 6)), rng, engine.table)
    engine.draft_as(Drafting([proposer], policy, engine.scheduler))
    step, texts = engine.step, [r.prompt_token_ids + outputs[r.row_id] for r in requests]

    def step_and_check() -> list[Completion]:
        completions = step()
        check_blocks(engine, texts)
        return completions

    engine.step = step_and_check  # type: ignore[method-assign]
    assert same(run(engine, requests, arrivals=rng), plain)
    stats = engine.stats
    assert sum(stats.drafted_by_place) == policy.total("drafted_D") > 0
    assert sum(stats.accepted_by_place) == policy.total("accepted_D") > 0
    assert stats.num_draft_steps == sum(o.verdict is not None for o in policy.outcomes)
    assert stats.num_steps == len(policy.outcomes)
    assert stats.generated_tokens == sum(o.num_generated for o in policy.outcomes)
    assert stats.generated_tokens == sum(len(c.token_ids) for c in plain.values())
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert max(engine.runner.tokens_per_step) <= engine.scheduler.max_num_batched_tokens  # type: ignore[attr-defined]
    assert not proposer.order_of
    assert proposer.num_finished == len(requests)


@pytest.mark.parametrize("seed", range(13))
def test_greedy_tokens_with_the_ngram_proposer_are_those_of_plain_steps(seed: int) -> None:
    """40 prompts each; the model's memory is short, so that the proposer finds something."""
    rng = np.random.default_rng(100 + seed)
    max_len = int(rng.choice([40, 64]))
    memory = int(rng.choice([1, 2]))
    engine = tight_engine(rng, max_len, memory)
    engine.draft_as(
        Drafting([NgramProposer(engine.table, int(rng.integers(1, 7)), 4096, 256)], FixedDrafts(6), engine.scheduler)
    )
    requests = random_requests(rng, 40, max_len)
    done = run(engine, requests, arrivals=rng)
    for request in requests:
        eos = not request.params.ignore_eos
        expected = expected_tokens(request.prompt_token_ids, request.params.max_tokens, max_len, eos, memory)
        assert done[request.row_id].token_ids == expected
    assert sum(engine.stats.accepted_by_place) > 0


def test_accepted_drafts_save_steps_and_are_counted_by_place() -> None:
    prompts = [[row, 5, 6] for row in range(4)]
    outputs = {row: expected_tokens(prompt, 30, 64, False) for row, prompt in enumerate(prompts)}
    engine = hash_engine(100, 4, max_num_seqs=4, max_num_batched_tokens=64)
    engine.draft_as(
        Drafting([Certain(engine.table, outputs, np.random.default_rng(0), 3)], FixedDrafts(3), engine.scheduler)
    )
    done = run(engine, [Request(r, p, SamplingParams(max_tokens=30, ignore_eos=True)) for r, p in enumerate(prompts)])
    assert {row: c.token_ids for row, c in done.items()} == outputs
    stats = engine.stats
    # Four tokens a step, seven times, the first time with the prompt; then two are left, of which one can be drafted.
    assert (stats.num_steps, stats.num_draft_steps) == (8, 8)
    assert stats.drafted_by_place == stats.accepted_by_place == [32, 28, 28, 0, 0, 0, 0, 0]
    assert sum(engine.runner.tokens_per_step) == 4 * 3 + 4 * 7 + 32 + 28 + 28  # type: ignore[attr-defined]


def test_places_from_the_eighth_on_are_counted_together() -> None:
    _, engine = certain_run(FREE, SamplingParams(max_tokens=11, ignore_eos=True), 10)
    assert engine.stats.drafted_by_place == engine.stats.accepted_by_place == [1, 1, 1, 1, 1, 1, 1, 3]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_survive_steps_with_drafts_that_run_out_of_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = odd_requests(rng, 30, 64)
    plain = run(roomy_engine(64, None), requests, check=False)
    engine = tight_engine(rng, 64, None)
    proposer = Recorded(engine.table, {row: c.token_ids for row, c in plain.items()}, rng)
    policy = Watched(5, rng, engine.table)
    engine.draft_as(Drafting([proposer], policy, engine.scheduler))
    observe = policy.observe

    def observe_and_check(outcome: StepOutcome) -> None:
        assert outcome.verdict is None or engine.scheduler.step_tokens == engine.scheduler.max_num_batched_tokens
        observe(outcome)

    policy.observe = observe_and_check  # type: ignore[method-assign]
    most = int(rng.integers(1, 12))
    failed = fail_where(engine, lambda step: len(step.token_id_T) > (1 if rng.random() < 0.1 else most))
    assert same(run(engine, requests, arrivals=rng), plain)
    assert len(failed) > 3
    assert engine.stats.num_out_of_memory == len(failed)


def test_nobody_is_preempted_or_kept_waiting_for_drafts() -> None:
    """Wrong drafts in a cache that is too small anyway: the same steps as without."""
    wrong = {row: [(t + 1) % VOCAB for t in expected_tokens([row, 5, 6], 30, 64, False)] for row in range(12)}

    def run_with(most: int) -> Engine:
        engine = hash_engine(
            24, 4, max_num_seqs=6, max_num_batched_tokens=30, max_model_len=64, enable_prefix_caching=False
        )
        engine.scheduler.admission.expected_output = 1
        if most:
            engine.draft_as(
                Drafting(
                    [Certain(engine.table, wrong, np.random.default_rng(1), most)], FixedDrafts(most), engine.scheduler
                )
            )
        requests = [Request(r, [r, 5, 6], SamplingParams(max_tokens=30, ignore_eos=True)) for r in range(12)]
        done = run(engine, requests)
        assert all(done[r].token_ids == expected_tokens([r, 5, 6], 30, 64, False) for r in range(12))
        return engine

    plain = run_with(0).stats
    assert plain.num_preemptions > 0
    for most in (1, 5):
        stats = run_with(most).stats
        assert stats.accepted_by_place == [0] * 8
        assert stats.drafted_1 > 100
        assert (stats.num_steps, stats.num_preemptions) == (plain.num_steps, plain.num_preemptions)
        assert (stats.recomputed_tokens, stats.batch_sum) == (plain.recomputed_tokens, plain.batch_sum)


def test_the_policy_is_told_what_the_step_is_made_of() -> None:
    engine = hash_engine(64, 4, max_num_batched_tokens=16)
    policy = Watched(3, np.random.default_rng(0), engine.table)
    engine.draft_as(
        Drafting([Recorded(engine.table, {0: [], 1: []}, np.random.default_rng(0))], policy, engine.scheduler)
    )
    for row in range(2):
        engine.add(Request(row, [row] * 20, SamplingParams(max_tokens=9, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    # The first prompt has 4 tokens left, of which the last is its own; then the other's; the third step has the rest.
    told = [outcome.facts for outcome in policy.outcomes]
    assert [(f.num_sequences, f.num_prefill, f.room) for f in told] == [(0, 16, 0), (1, 15, 0), (2, 7, 7), (2, 0, 14)]
    assert [f.num_waiting for f in told] == [1, 0, 0, 0]
    assert [o.num_generated for o in policy.outcomes][:2] == [0, 1]


def certain_run(drafts: list[int], params: SamplingParams, most: int, bad_token: int | None = None):
    """The completion of the prompt [3, 1, 4], and its engine."""
    engine = hash_engine(64, 4, bad_token=bad_token, max_num_batched_tokens=64)
    proposer = Certain(engine.table, {0: drafts}, np.random.default_rng(0), most)
    engine.draft_as(Drafting([proposer], FixedDrafts(most), engine.scheduler))
    return run(engine, [Request(0, [3, 1, 4], params)])[0], engine


FREE = expected_tokens([3, 1, 4], 40, 64, False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop": (f" {FREE[5]} {FREE[6]} ",)}, "stop"),
        ({"stop_token_ids": (FREE[8],)}, "stop"),
        ({"max_tokens": 7}, "length"),
    ],
)
def test_a_sequence_ends_where_plain_steps_would_end_it(options: dict, reason: str) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | options)
    plain = run(hash_engine(64, 4), [Request(0, [3, 1, 4], params)])[0]
    length = len(plain.token_ids)
    assert 6 <= length < 12
    for most in range(1, 12):
        done, engine = certain_run(FREE, params, most)
        assert (done.token_ids, done.finish_reason, done.text) == (FREE[:length], reason, plain.text)
        assert engine.stats.generated_tokens == length
        assert engine.stats.num_steps == -(-length // (most + 1))
        again = run(engine, [Request(0, [3, 1, 4, *FREE[:20]], SamplingParams(max_tokens=1))])[0]
        assert again.num_cached_tokens == 0, "neither what it generated nor what lies behind its end is findable"


def test_eos_among_accepted_drafts_ends_the_sequence() -> None:
    params = SamplingParams(max_tokens=40)
    for row in range(3000):
        plain = expected_tokens([row // 90, row % 90], 40, 64, True)
        if EOS in plain[3:]:
            break
    engine = hash_engine(64, 4, max_num_batched_tokens=64)
    beyond = {0: expected_tokens([row // 90, row % 90], 40, 64, False)}
    engine.draft_as(
        Drafting([Certain(engine.table, beyond, np.random.default_rng(0), 30)], FixedDrafts(30), engine.scheduler)
    )
    done = run(engine, [Request(0, [row // 90, row % 90], params)])[0]
    assert (done.token_ids, done.finish_reason) == (plain, "stop")
    assert engine.stats.num_steps < len(plain)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 9])
def test_non_finite_logits_end_a_row_only_where_it_would_have_come_to_them(most: int) -> None:
    """Behind a wrong draft, and behind the end of a sequence, broken logits are nobody's."""
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    absent = next(token for token in range(VOCAB) if token not in FREE[:20])
    misled, engine = certain_run([absent if i % 5 == 4 else token for i, token in enumerate(FREE)], plain, most, absent)
    assert (misled.error, misled.token_ids) == (None, FREE[:20])
    assert sum(engine.stats.accepted_by_place) < sum(engine.stats.drafted_by_place)
    first = FREE.index(FREE[6])
    broken, engine = certain_run(FREE, plain, most, FREE[6])
    assert (broken.error, broken.token_ids) == ("non_finite_logits", [])
    assert f"after {first + 1} generated tokens" in (broken.error_message or "")
    engine.pool.check()
    stopped, _ = certain_run(FREE, replace(plain, stop_token_ids=(FREE[6],)), most, FREE[6])
    assert (stopped.error, stopped.token_ids) == (None, FREE[: first + 1])


def test_poisoned_blocks_of_a_broken_row_are_cleaned_and_not_shared() -> None:
    engine = hash_engine(64, 4, bad_token=77)
    outputs = {row: expected_tokens([row, 5, 6, 7, 8], 6, 64, False) for row in range(3)} | {"bad": [1] * 9}
    engine.draft_as(
        Drafting([Recorded(engine.table, outputs, np.random.default_rng(3))], FixedDrafts(5), engine.scheduler)
    )
    good = [Request(row, [row, 5, 6, 7, 8], SamplingParams(max_tokens=6, ignore_eos=True)) for row in range(3)]
    done = run(engine, [*good, Request("bad", [1, 2, 77, 4, 5, 6], SamplingParams(max_tokens=6, ignore_eos=True))])
    assert done["bad"].error == "non_finite_logits"
    assert [done[row].token_ids for row in range(3)] == [outputs[row] for row in range(3)]
    assert run(engine, [Request("bad", [1, 2, 77, 4, 5, 6], SamplingParams())])["bad"].num_cached_tokens == 0


def test_aborting_in_the_middle_leaves_nothing_behind() -> None:
    engine = hash_engine(64, 4, memory=1)
    engine.draft_as(Drafting([NgramProposer(engine.table, 4)], FixedDrafts(4), engine.scheduler))
    for row in range(6):
        engine.add(Request(row, [row, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    assert engine.abort(2)
    done = run(engine, [])
    assert sorted(done) == [0, 1, 3, 4, 5]
    assert all(done[r].token_ids == expected_tokens([r, 5, 6], 40, 64, False, 1) for r in done)


def test_a_proposer_comes_before_the_first_request() -> None:
    engine = hash_engine(64, 4)
    engine.add(Request(0, [1, 2], SamplingParams()))
    engine.step()
    with pytest.raises(AssertionError, match="unknown to the proposers"):
        engine.draft_as(Drafting([NgramProposer(engine.table, 4)], FixedDrafts(4), engine.scheduler))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("speculation"), Family("llama3", "llama"), seed=8)


REAL_KINDS = [
    {},
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 40, "logprobs": 1},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3, "logprobs": 3},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(100))},
    {"stop": ("e",), "temperature": 0.8},
]


def test_the_real_model_gives_the_same_tokens(folder: Path) -> None:
    """Prompts that repeat themselves, so that the proposer drafts all the time; and drafts that are mostly right."""
    rng = np.random.default_rng(5)
    prompts = [(rng.integers(0, 255, int(rng.integers(1, 20))).tolist() * 4)[:70] for _ in range(32)]
    params = [
        SamplingParams(**{"max_tokens": 12 + row % 5, "ignore_eos": True, "seed": row} | REAL_KINDS[row % 8])
        for row in range(32)
    ]
    with float32_engine(folder) as engine:
        plain = engine.generate(prompts, params)
        num_plain_steps = engine.stats.num_steps
    with float32_engine(folder, speculation={"proposer": "ngram", "max_draft_tokens": 3, "forced": True}) as engine:
        assert engine.resolved["speculation"] == "ngram, up to 3 tokens, in every step"
        assert same(dict(enumerate(engine.generate(prompts, params))), dict(enumerate(plain)))
        assert sum(engine.stats.drafted_by_place[:3]) == sum(engine.stats.drafted_by_place) > 100
    with float32_engine(folder, kv_cache_memory_bytes=1 << 18, max_model_len=96) as engine:
        outputs = {row: completion.token_ids for row, completion in enumerate(plain)}
        engine.draft_as(
            Drafting([Recorded(engine.table, outputs, rng, vocab_size=250)], FixedDrafts(5), engine.scheduler)
        )
        engine.scheduler.admission.expected_output = 1
        assert same(dict(enumerate(engine.generate(prompts, params))), dict(enumerate(plain)))
        drafted, accepted = sum(engine.stats.drafted_by_place), sum(engine.stats.accepted_by_place)
        assert accepted > 100
        assert engine.stats.rejected_drafts == drafted - accepted > 0
        assert 0 < engine.stats.drafts_us < engine.stats.decode_us
        assert engine.stats.num_steps < num_plain_steps


def test_steps_with_drafts_run_through_all_layers_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that compute prompts as well, of whose tokens the last layer computes only some."""
    prompts = [([7, 8, 9, 7] * 6)[:length] for length in (5, 18, 23)]
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    drafted: list[int] = []
    run = CompiledDecodeSteps.run

    def seen(self: CompiledDecodeSteps, x_TH: torch.Tensor, *others: Any) -> None:
        where = others[3]
        drafted.append(len(x_TH) - len(where.context_len_S))
        run(self, x_TH, *others)

    monkeypatch.setattr(CompiledDecodeSteps, "run", seen)
    with float32_engine(folder, quantization="int4-rtn") as engine:
        plain = engine.generate(prompts, params)
        assert drafted
        assert not any(drafted)
    drafted.clear()
    speculation = {"proposer": "ngram", "max_draft_tokens": 6, "forced": True}
    with float32_engine(folder, quantization="int4-rtn", speculation=speculation) as engine:
        assert same(dict(enumerate(engine.generate(prompts, params))), dict(enumerate(plain)))
        assert sum(map(bool, drafted)) >= engine.stats.num_draft_steps - len(prompts) > 10
        assert max(drafted) > 6


def test_logits_behind_drafts_are_those_of_plain_steps(folder: Path) -> None:
    def run_and_keep(drafts: list[int] | None) -> tuple[list[int], torch.Tensor]:
        with float32_engine(folder) as engine:
            execute, kept = engine.runner.execute, []

            def execute_and_keep(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
                kept.append(execute(step, future).clone())
                return kept[-1]

            engine.runner.execute = execute_and_keep  # type: ignore[method-assign]
            if drafts is not None:
                engine.draft_as(
                    Drafting(
                        [Certain(engine.table, {0: drafts}, np.random.default_rng(0), 5)],
                        FixedDrafts(5),
                        engine.scheduler,
                    )
                )
            done = engine.generate([[7, 8, 9, 10, 11]], SamplingParams(max_tokens=24, ignore_eos=True))[0]
            return done.token_ids, torch.cat(kept)

    tokens, plain_RV = run_and_keep(None)
    again, ours_RV = run_and_keep(tokens)
    assert again == tokens
    assert ours_RV.shape == plain_RV.shape == (24, plain_RV.shape[1])
    assert float((ours_RV - plain_RV).abs().max()) < LOGIT_TOLERANCE


@pytest.mark.parametrize("speculation", ["off", "auto", False])
def test_speculation_is_off_unless_asked_for(folder: Path, speculation: str | bool) -> None:
    with float32_engine(folder, speculation=speculation) as engine:
        assert engine.drafting is None
        assert engine.resolved["speculation"] == "off"


@pytest.mark.parametrize(
    ("speculation", "said"),
    [
        ("on", "expected off, auto or"),
        (True, "expected off, auto or"),
        ({"proposer": "eagle"}, "expected one of ngram, draft"),
        ({"proposer": "draft"}, "needs model.draft"),
        ({"proposer": "ngram", "forced": 1}, "expected true or false"),
        ({"forced": True}, "needs a proposer"),
        ({"proposer": "ngram", "most": 3}, "expected off, auto or"),
        ({"proposer": "ngram", "max_draft_tokens": 0}, "from 1 to 32"),
        ({"proposer": "ngram", "max_draft_tokens": True}, "from 1 to 32"),
    ],
)
def test_speculation_that_is_not_known_is_refused(folder: Path, speculation, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        float32_engine(folder, speculation=speculation)
