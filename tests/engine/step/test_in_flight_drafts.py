"""Drafts on a device that works in parallel with the host: the order of launches and reads, and the same tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.drafts.draft_model import DraftModelProposer
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts, Proposal, StepFacts
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.sampling.on_device import PendingOutput
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.slot_table import PLACEHOLDER_TOKEN
from pipeline.engine.schedule.step_plan import StepInput
from tests.engine.drafts.proposers import draft_with
from tests.engine.drafts.random_rows import odd_requests, roomy_engine, same
from tests.engine.drafts.test_draft_model import Fitful, draft_with_itself
from tests.engine.hash_runner import before_each_step, check_tokens, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run


class KnownTokens(NgramProposer):
    """Proposer that fails if a requested token is a placeholder."""

    def propose(self, slot_S: np.ndarray) -> Proposal:
        for slot in slot_S.tolist():
            assert PLACEHOLDER_TOKEN not in self.table.token_ids[slot, : self.table.num_known[slot]]
        return super().propose(slot_S)


class Chosen(FixedDrafts):
    """Policy that drafts in these steps, or in all if None."""

    def __init__(self, steps: set[int] | None) -> None:
        self.steps, self.count = steps, -1

    def select(self, facts: StepFacts) -> bool:
        self.count += 1
        return self.steps is None or self.count in self.steps


def order_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives launches of the target's steps ("L") and reads of their tokens ("R")."""
    events: list[str] = []
    before_each_step(engine, lambda step, future: events.append("L"))
    output = PendingOutput.output

    def read(pending: PendingOutput) -> Any:
        events.append("R")
        return output(pending)

    monkeypatch.setattr(PendingOutput, "output", read)
    return events


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (set(), "LLRLRLR"),  # plain steps of an engine that could draft overlap
        (None, "LRLRLRLR"),  # a step with drafts is read before anything is planned after it
        ({3}, "LLRLRRLRLLR"),  # one among plain steps: the step in flight is read first
    ],
)
def test_the_order_of_launches_and_reads(
    steps: set[int] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hash_engine(120, 4, memory=1, is_asynchronous=True, max_num_batched_tokens=200)
    draft_with(engine, KnownTokens(engine.table, 4), Chosen(steps))
    events = order_of(engine, monkeypatch)
    chains = [[n, *expected_tokens([n], 20, 64, False, 1), n] for n in range(6)]  # after its end it repeats
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request(n, chain, params) for n, chain in enumerate(chains)]
    check_tokens(run(engine, requests, check=False), requests, memory=1)
    assert "".join(events).startswith(expected)
    assert (sum(engine.stats.accepted_by_position) > 0) == (steps != set())


def drafting_engine(max_drafts: int = 4, wrong: float = 0.0, **options: Any) -> tuple[Engine, DraftModelProposer]:
    """Build an engine whose draft model is the target, except for a share of wrong drafts."""
    engine = hash_engine(**{"num_blocks": 120, "max_num_batched_tokens": 64, "is_asynchronous": True} | options)
    proposer, rng = draft_with_itself(engine, max_drafts), np.random.default_rng(max_drafts)
    execute = proposer.runner.execute

    def execute_with_errors(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        logits_RV = execute(step, future)
        logits_RV[torch.from_numpy(rng.random(len(logits_RV)) < wrong), 5] = 2.0
        return logits_RV

    proposer.runner.execute = execute_with_errors  # type: ignore[method-assign]
    draft_with(engine, proposer, Fitful(max_drafts, rng))
    return engine, proposer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["draft model", "lookup"])
def test_rows_of_every_kind_get_the_tokens_of_plain_steps(seed: int, kind: str) -> None:
    """Rows have stop strings, penalties, masks and log-probabilities; sampled ones use the numbers of plain steps."""
    rng = np.random.default_rng(200 + seed)
    requests = odd_requests(rng, 40, 64)
    plain = run(roomy_engine(64, None), requests, check=False)
    sizes = {"num_blocks": int(rng.integers(20, 90)), "max_num_seqs": 8}
    engine, proposer = drafting_engine(4, 0.3, **sizes, has_states=kind == "lookup")
    proposer.exposes_draft_probs = False
    if kind == "lookup":
        draft_with(engine, KnownTokens(engine.table, 4), Fitful(4, rng))
    assert same(run(engine, requests, arrivals=rng), plain)
    if kind == "draft model":
        assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_04_steps_with_drafts_that_do_not_fit(is_asynchronous: bool) -> None:
    rng = np.random.default_rng(1)
    engine, _ = drafting_engine(3, 0.3, max_num_seqs=8, is_asynchronous=is_asynchronous)
    failed: list[bool] = []

    def fail_sometimes(step: StepInput, future: FutureTokens | None) -> None:
        has_drafts = len(step.logit_row_R) > len(step.context_len_S)
        if len(step.token_id_T) > 2 and rng.random() < (0.3 if has_drafts else 0.05):
            failed.append(has_drafts)
            raise MemoryError

    before_each_step(engine, fail_sometimes)
    requests = random_requests(rng, 40, 64)
    check_tokens(run(engine, requests, arrivals=rng), requests)
    assert engine.stats.num_out_of_memory == len(failed)
    assert any(failed)


def test_nan_logits_among_drafts_end_their_row_only() -> None:
    ended = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        engine = hash_engine(60, 4, bad_token=13, is_asynchronous=True, max_num_batched_tokens=64)
        draft_with(engine, draft_with_itself(engine, 4))
        requests = random_requests(rng, 30, 64)
        done = run(engine, requests, arrivals=rng)
        for request in requests:
            eos = not request.params.ignore_eos
            expected = expected_tokens(request.prompt_token_ids, request.params.max_tokens, 64, eos)
            if 13 in [*request.prompt_token_ids, *expected][:-1]:
                ended += 1
                assert done[request.row_id].error == "non_finite_logits"
            else:
                assert done[request.row_id].token_ids == expected
    assert ended > 5


def test_a_request_is_aborted_between_steps_with_drafts() -> None:
    engine, _ = drafting_engine(4, 0.3)
    requests = [Request(n, [n, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True)) for n in range(4)]
    for request in requests:
        engine.add(request)
    done = engine.step() + engine.step() + engine.step()
    assert engine.abort(2)
    while engine.has_unfinished:
        done += engine.step()
    check_tokens({c.row_id: c for c in done}, [requests[n] for n in (0, 1, 3)])
    assert engine.pool.num_held == 0


def test_penalties_of_a_draft_model_count_its_own_drafts() -> None:
    """Drafts that have the target's distribution are all accepted."""
    engine, _ = drafting_engine(4)
    params = [{"repetition_penalty": 3.0}, {"frequency_penalty": 2.0, "presence_penalty": 0.5}, {"min_tokens": 9}]
    rows = [Request(n, [n, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True)) for n in range(6)]
    requests = [replace(r, params=replace(r.params, **params[n % 3])) for n, r in enumerate(rows)]  # type: ignore[arg-type]
    done = run(engine, requests)
    plain = run(hash_engine(120, 4, max_num_batched_tokens=64), requests)
    assert same(done, plain)
    assert engine.stats.accepted_by_position == engine.stats.drafted_by_position
    assert engine.stats.drafted_by_position[3] > 10
