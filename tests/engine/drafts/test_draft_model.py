"""A draft model's KV cache follows the target's blocks; its drafts change only the number of steps.

Most tests draft with the target's own hash model: then every draft must be accepted, and a rejected one shows that a
draft key was missing, stale or another sequence's.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.engine.drafts.draft_model import NEAR, DraftModelProposer
from pipeline.engine.drafts.policy import FixedDrafts, Proposal, StepFacts
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.errors import ModelError
from pipeline.kernels.reference import greedy
from pipeline.roofline.kv_pages import KVPages
from tests.engine.drafts.proposers import draft_with
from tests.engine.hash_runner import (
    VOCAB,
    HashRunner,
    before_each_step,
    check_tokens,
    expected_tokens,
    hash_engine,
    tight_engine,
    watched,
)
from tests.engine.sampling.sampled_rows import p_value
from tests.engine.schedule.test_scheduler import random_requests, run
from tests.model_folders import Family, make_family
from tests.parity.harness import float32_engine


class Fitful(FixedDrafts):
    """Policy that drafts in a random number of steps, then in none for a random number."""

    def __init__(self, max_drafts: int, rng: np.random.Generator) -> None:
        self.max_drafts, self.rng, self.steps_left, self.on = max_drafts, rng, 0, False

    def select(self, facts: StepFacts) -> bool:
        if self.steps_left == 0:
            self.on, self.steps_left = not self.on, int(self.rng.integers(1, 14))
        self.steps_left -= 1
        return self.on

    def lengths(self, facts: StepFacts, proposal: Proposal) -> np.ndarray:
        return self.rng.integers(0, self.max_drafts + 1, len(proposal.slot_S))


def draft_with_itself(
    engine: Engine, max_drafts: int, catch_up: int = 512, memory: int | None = None
) -> DraftModelProposer:
    """Draft with the target's own model, with a cache that turns stale with the target's."""
    runner = HashRunner(engine.pool.num_blocks, engine.table.pages, memory=memory)
    allocate = engine.pool.allocate

    def allocate_stale(count: int) -> list[int]:
        blocks = allocate(count)
        runner.cache[blocks] = -7
        return blocks

    engine.pool.allocate = allocate_stale  # type: ignore[method-assign]
    return DraftModelProposer(runner, engine.table, engine.pool, max_drafts, VOCAB, catch_up)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(7))
def test_a_draft_that_is_the_target_is_always_accepted(seed: int, is_asynchronous: bool) -> None:
    """Rows share blocks, are cut and preempted, catch up over several steps and draft in some of them."""
    rng = np.random.default_rng(seed)
    max_len = int(rng.choice([40, 64]))
    engine = tight_engine(rng, max_len, is_asynchronous=is_asynchronous)
    seen = watched(engine)
    proposer = draft_with_itself(engine, 5, catch_up=int(rng.integers(3, 60)))
    draft_with(engine, proposer, Fitful(5, rng))
    requests = random_requests(rng, 40, max_len)
    check_tokens(run(engine, requests, arrivals=rng), requests, max_len)
    assert engine.stats.drafted_by_position[0] > 30
    assert engine.stats.accepted_by_position == engine.stats.drafted_by_position
    assert any(late for _, late in seen) == is_asynchronous


def test_a_shared_prefix_is_computed_once_by_the_draft_too() -> None:
    engine = hash_engine(100, 4, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    proposer = draft_with_itself(engine, 3)
    draft_with(engine, proposer)
    head = list(range(40))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [Request(0, [*head, 1, 2], params), Request(1, [*head, 3, 4], params)]
    computed = []
    for request in requests:
        check_tokens(run(engine, [request]), [request])
        computed.append(sum(proposer.runner.tokens_per_step))  # type: ignore[attr-defined]
    assert computed[0] >= 42
    assert computed[1] == 2 * computed[0] - 40


def test_rejected_drafts_cost_the_draft_no_token_more() -> None:
    """The first pass of a step computes the target's token, and the last draft if all were accepted."""
    engine, seen = hash_engine(64, 4, max_num_seqs=2), []
    proposer = draft_with_itself(engine, 5, memory=1)  # not the target's, which depends on all tokens

    def note(step: StepInput, future: FutureTokens | None) -> None:
        seen.append((int(step.position_T.min()), int(np.diff(step.query_start_S1).max())))

    before_each_step(proposer, note)
    draft_with(engine, proposer)
    requests = [Request(row, [row], SamplingParams(max_tokens=30, ignore_eos=True)) for row in range(2)]
    check_tokens(run(engine, requests), requests)
    assert engine.stats.rejected_drafts > 150
    assert min(first for first, _ in seen) == 0
    assert max(count for _, count in seen) <= 2


def test_catching_up_is_bounded_in_each_step() -> None:
    """Nothing is drafted for a sequence before the draft model has almost caught up."""
    engine = hash_engine(100, 4, max_model_len=200, max_num_seqs=3, max_num_batched_tokens=300)
    proposer = draft_with_itself(engine, 3, catch_up=20)
    draft_with(engine, proposer)
    for row in range(3):
        engine.add(Request(row, [row] * 60, SamplingParams(max_tokens=30, ignore_eos=True)))
    drafted = []
    for _ in range(8):
        engine.step()
        drafted.append(engine.stats.drafted_by_position[0])
    steps = proposer.runner.tokens_per_step  # type: ignore[attr-defined]
    assert max(steps) <= 20 + 3 * (NEAR + 1)
    assert drafted[:2] == [0, 0] < drafted[-1:]
    assert engine.stats.accepted_by_position == engine.stats.drafted_by_position


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_04_passes_of_the_draft_model_that_do_not_fit_cost_no_row(num_rows: int, is_asynchronous: bool) -> None:
    """Their step is undone, and the next ones are computed without drafts for a while."""
    engine = hash_engine(120, 4, max_num_batched_tokens=16, is_asynchronous=is_asynchronous)
    proposer, rng = draft_with_itself(engine, 3), np.random.default_rng(num_rows)
    failed, drafted = [], []

    def fail_sometimes(step: StepInput, future: FutureTokens | None) -> None:
        assert engine.scheduler.step_tokens == 16, "called in a limited step"
        if engine.stats.num_steps and rng.random() < 0.3:  # from the first step of one token on
            failed.append(engine.stats.num_steps)
            raise MemoryError
        drafted.append(engine.stats.num_steps)

    before_each_step(proposer, fail_sometimes)
    draft_with(engine, proposer)
    requests = [Request(row, [row, 5, 6], SamplingParams(max_tokens=55, ignore_eos=True)) for row in range(num_rows)]
    requests += [Request(row + 10, [row, 5, 6], SamplingParams(max_tokens=55, ignore_eos=True)) for row in range(12)]
    done = run(engine, requests[:num_rows]) | run(engine, requests[num_rows:])
    check_tokens(done, requests)
    assert engine.stats.num_out_of_memory == len(failed) > 0
    assert max(drafted) > min(failed), "drafting resumes"
    assert engine.stats.accepted_by_position == engine.stats.drafted_by_position


def test_04_a_draft_model_that_never_fits_is_not_called_in_steps_of_one_token() -> None:
    """If every step has one token, no row is blamed for a failed pass."""
    engine = hash_engine(120, 4, max_num_seqs=1, max_num_batched_tokens=1)
    proposer = draft_with_itself(engine, 3)

    def fail(step: StepInput, future: FutureTokens | None) -> None:
        raise MemoryError

    before_each_step(proposer, fail)
    draft_with(engine, proposer)
    requests = [Request(row, [row] * 30, SamplingParams(max_tokens=9, ignore_eos=True)) for row in range(5)]
    check_tokens(run(engine, requests), requests)
    assert engine.stats.num_out_of_memory == 0


def test_a_vocabulary_of_another_size() -> None:
    """Ids that only the draft has are never drafted; a draft that lacks some drafts the others."""

    class Cut(HashRunner):
        vocab_size = 60

        def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
            return super().execute(step, future)[:, : self.vocab_size]

    class Padded(HashRunner):
        def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
            logits = super().execute(step, future)
            return torch.cat([logits, torch.full((len(logits), 30), 9.0)], dim=1)

    for runner_of, accepts_all in ((Cut, False), (Padded, True)):
        engine = hash_engine(100, 4, max_num_batched_tokens=64)
        proposer = DraftModelProposer(runner_of(100, engine.table.pages), engine.table, engine.pool, 3, VOCAB)
        draft_with(engine, proposer)
        done = run(engine, [Request(0, [5, 6], SamplingParams(max_tokens=40, ignore_eos=True))])[0]
        assert done.token_ids == expected_tokens([5, 6], 40, 64, False)
        drafted, accepted = sum(engine.stats.drafted_by_position), sum(engine.stats.accepted_by_position)
        assert 0 < accepted <= drafted
        assert (accepted == drafted) == accepts_all


class TableRunner:
    """The distribution of the next token depends on the last one alone."""

    is_asynchronous, greedy, has_vocabulary_head = False, staticmethod(greedy), True

    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV, self.vocab_size = logits_VV, len(logits_VV)

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        return self.logits_VV[torch.from_numpy(step.token_id_T[step.logit_row_R])]

    def zero_pages(self, blocks: list[int]) -> None: ...


class NoText:
    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def close(self) -> None: ...


@pytest.mark.parametrize("renormalised", [True, False])
def test_sampled_tokens_have_the_distribution_of_the_target(renormalised: bool) -> None:
    """The joint distribution of three tokens, drafts included, by chi-square against exact enumeration; a draft
    with a wrong reported distribution must fail."""
    torch.manual_seed(3)
    target_VV, draft_VV = 1.5 * torch.randn(4, 4), 1.5 * torch.randn(4, 4)
    count, temperature = 20_000, 0.8
    engine = Engine.from_parts(
        TableRunner(target_VV),
        NoText(),  # type: ignore[arg-type]
        num_pages=4096,
        kv_pages=KVPages(4, 0),
        max_model_len=8,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        seed=11,
    )
    proposer = DraftModelProposer(TableRunner(draft_VV), engine.table, engine.pool, 2, 4)  # type: ignore[arg-type]
    if not renormalised:
        draft = proposer.draft

        def draft_with_wrong_q(proposal: Proposal, count_S: np.ndarray):
            drafts = draft(proposal, count_S)
            drafts.q_SKV.copy_(torch.full_like(drafts.q_SKV, 0.25))  # type: ignore[union-attr]
            return drafts

        proposer.draft = draft_with_wrong_q  # type: ignore[method-assign]
    draft_with(engine, proposer)
    params = SamplingParams(max_tokens=3, temperature=temperature)
    texts = np.array([c.token_ids for c in engine.stream(Request(row, [1], params) for row in range(count))])
    p_VV = torch.softmax(target_VV.double() / temperature, dim=-1).numpy()
    joint_VVV = p_VV[1][:, None, None] * p_VV[:, :, None] * p_VV[None, :, :]
    value = p_value(texts, joint_VVV)
    assert 0 < engine.stats.accepted_by_position[1] < engine.stats.drafted_by_position[1]
    assert (value > 1e-4) == renormalised, value


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model with other weights."""
    family = Family("llama3", "llama")
    return tuple(make_family(tmp_path_factory.mktemp(name), family, seed=seed) for name, seed in (("a", 8), ("b", 9)))  # type: ignore[return-value]


@pytest.mark.parametrize("forced", [True, False])
def test_real_models_give_the_same_tokens(folders: tuple[Path, Path], forced: bool) -> None:
    target, draft = folders
    rng = np.random.default_rng(4)
    prompts = [(rng.integers(0, 255, int(rng.integers(1, 20))).tolist() * 3)[:50] for _ in range(24)]
    kinds = [{}, {}, {"repetition_penalty": 1.4}, {"logprobs": 2}, {"min_tokens": 9, "ignore_eos": False}]
    params = [
        SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | kinds[row % len(kinds)])  # type: ignore[arg-type]
        for row in range(len(prompts))
    ]
    with float32_engine(target) as engine:
        plain = [c.token_ids for c in engine.generate(prompts, params)]
    for other in (draft, target):
        with float32_engine(target, speculation=SpeculationConfig("draft_model", str(other), 3, forced)) as engine:
            assert ("in every step" in engine.resolved["speculation"]) == forced  # type: ignore[operator]
            assert [c.token_ids for c in engine.generate(prompts, params)] == plain
            drafted, accepted = sum(engine.stats.drafted_by_position), sum(engine.stats.accepted_by_position)
            if forced:
                assert drafted > 300
                if other == target:
                    assert accepted == drafted


def test_a_draft_with_other_tokens_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = folders
    other = make_family(tmp_path, Family("other", "qwen2"), seed=1)
    tokenizer = (other / "tokenizer.json").read_text()
    assert '"a"' in tokenizer
    (other / "tokenizer.json").write_text(tokenizer.replace('"a":', '"zz":', 1))
    with pytest.raises(ModelError, match="its tokens differ from those of"):
        float32_engine(target, speculation=SpeculationConfig("draft_model", str(other)))
