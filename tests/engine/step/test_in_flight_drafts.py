"""Steps with drafts are launched before the host knows what became of the drafts before them, and change no token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.drafts.draft_model import DraftModelProposer
from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens, StepInFlight
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from tests.engine.drafts.random_rows import odd_requests, roomy_engine, same
from tests.engine.drafts.test_draft_model import Fitful, draft_with_itself
from tests.engine.hash_runner import before_each_step, check_tokens, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run
from tests.engine.step.test_in_flight import watched

READS = ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def drafting_engine(most: int = 4, wrong: float = 0.0, **options: Any) -> Engine:
    """Both models work beside the host. The draft model is the target, but for a share of wrong drafts."""
    options = {"num_blocks": 120, "max_num_batched_tokens": 64} | options
    engine = hash_engine(is_asynchronous=True, **options)
    proposer, rng = draft_with_itself(engine, most), np.random.default_rng(most)
    proposer.runner.is_asynchronous = True
    best = proposer.runner.greedy

    def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
        found_2R = best(logits_RV)
        found_2R[0, torch.from_numpy(rng.random(len(logits_RV)) < wrong)] = 5
        return found_2R

    proposer.runner.greedy = greedy  # type: ignore[method-assign]
    engine.draft_as(Drafting([proposer], FixedDrafts(most), engine.scheduler))
    return engine


def greedy_rows(count: int, max_tokens: int = 21) -> list[Request]:
    return [Request(n, [n, 5, 6], SamplingParams(max_tokens=max_tokens, ignore_eos=True)) for n in range(count)]


class Waits:
    """Reads of the device's tensors by the host, but for those of `StepInFlight.output`, and how many steps had been
    launched when a step's tokens were read."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[str] = []
        self.launched = 0
        self.read_at: list[int] = []
        self._is_fine = 0  # in the device's own work, and where a step is landed
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))
        output = StepInFlight.output

        def land(flight: StepInFlight) -> Any:
            self.read_at.append(self.launched)
            return self._on_device(output)(flight)

        monkeypatch.setattr(StepInFlight, "output", land)
        runners = [engine.runner, *(p.runner for p in engine.drafting.proposers if isinstance(p, DraftModelProposer))]  # type: ignore[union-attr]
        for runner in runners:
            for name in ("execute", "greedy", "sample"):
                setattr(
                    runner, name, self._on_device(getattr(runner, name), runner is engine.runner and name == "execute")
                )

    def _counted(self, name: str, read: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self._is_fine:
                self.early.append(name)
            return read(*args, **kwargs)

        return counted

    def _on_device(self, work: Callable, is_launch: bool = False) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._is_fine += 1
            self.launched += is_launch
            try:
                return work(*args, **kwargs)
            finally:
                self._is_fine -= 1

        return run


def test_every_step_with_drafts_is_launched_before_the_last_ones_tokens_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = drafting_engine(wrong=0.3)
    waits, requests = Waits(engine, monkeypatch), greedy_rows(6)
    done = run(engine, requests, check=False)
    check_tokens(done, requests)
    assert waits.early == [], "between a step and the next one nothing of the device is asked for"
    num_steps = engine.stats.num_steps
    assert waits.read_at[: num_steps - 1] == [*range(2, num_steps + 1)], "a step is read when the next one is under way"
    assert engine.stats.num_draft_steps >= num_steps - 2
    assert 0 < sum(engine.stats.accepted_by_place) < sum(engine.stats.drafted_by_place)


def test_plain_steps_of_an_engine_that_could_draft_wait_for_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(FixedDrafts):
        def select(self, facts: object) -> int | None:
            return None

    engine = drafting_engine()
    engine.drafting.policy = Never(4)  # type: ignore[union-attr]
    waits = Waits(engine, monkeypatch)
    check_tokens(run(engine, greedy_rows(6), check=False), greedy_rows(6))
    assert waits.early == []
    assert waits.read_at[:-1] == [*range(2, engine.stats.num_steps + 1)]


def test_looked_up_drafts_wait_for_the_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is planned while the one before it runs, and then its tokens are read, before it is launched."""
    engine = hash_engine(120, 4, memory=1, is_asynchronous=True, max_num_batched_tokens=200)
    engine.draft_as(Drafting([NgramProposer(engine.table, 4)], FixedDrafts(4), engine.scheduler))
    waits, planned_at = Waits(engine, monkeypatch), []
    plan = engine.scheduler.plan

    def plan_and_note() -> Any:
        planned_at.append(len(waits.read_at))
        return plan()

    engine.scheduler.plan = plan_and_note  # type: ignore[method-assign]
    chains = [[n, *expected_tokens([n], 20, 64, False, 1), n] for n in range(6)]  # behind its end it begins again
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request(n, chain, params) for n, chain in enumerate(chains)]
    check_tokens(run(engine, requests, check=False), requests, memory=1)
    assert sum(engine.stats.accepted_by_place) > 0
    assert waits.early == []
    assert waits.read_at == [*range(1, engine.stats.num_steps + 1)], "one wait a step"
    assert planned_at[: engine.stats.num_steps] == [max(step - 1, 0) for step in range(engine.stats.num_steps)]


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_of_sharing_chunks_and_preemption_ahead_of_the_device(seed: int) -> None:
    """The draft is the target: each draft that is not accepted shows that a key was missing, stale or elsewhere."""
    rng = np.random.default_rng(seed)
    max_len, size = int(rng.choice([40, 64])), int(rng.choice([1, 3, 4, 8]))
    engine = drafting_engine(
        5,
        num_blocks=-(-max_len // size) + int(rng.integers(0, 3 * max_len // size)),
        block_size=size,
        max_model_len=max_len,
        max_num_seqs=int(rng.integers(1, 9)),
        max_num_batched_tokens=int(rng.integers(9, 60)),
        enable_prefix_caching=bool(rng.random() < 0.8),
    )
    seen = watched(engine)
    engine.drafting.policy = Fitful(5, rng)  # type: ignore[union-attr]
    requests = random_requests(rng, 40, max_len)
    check_tokens(run(engine, requests, arrivals=rng), requests, max_len)
    assert engine.stats.drafted_1 > 30
    assert engine.stats.accepted_by_place == engine.stats.drafted_by_place
    assert any(late for _, late in seen)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_fall_move_their_sequences_back(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    engine = drafting_engine(4, 0.3, num_blocks=int(rng.integers(20, 60)), max_num_seqs=int(rng.integers(2, 9)))
    engine.drafting.policy = Fitful(4, rng)  # type: ignore[union-attr]
    requests = random_requests(rng, 40, 64)
    check_tokens(run(engine, requests, arrivals=rng), requests)
    assert 0 < sum(engine.stats.accepted_by_place) < sum(engine.stats.drafted_by_place)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["draft", "ngram", "both"])
def test_rows_of_every_kind_get_the_tokens_of_plain_steps(seed: int, kind: str) -> None:
    """Stop strings, penalties, masks, log-probabilities, drawn rows (with the very numbers of plain steps)."""
    rng = np.random.default_rng(200 + seed)
    requests = odd_requests(rng, 40, 64)
    plain = run(roomy_engine(64, None), requests, check=False)
    engine = drafting_engine(4, 0.3, num_blocks=int(rng.integers(20, 90)), max_num_seqs=8)
    (draft,) = engine.drafting.proposers  # type: ignore[union-attr]
    draft.exposes_draft_probs = False  # type: ignore[attr-defined]
    proposers = {"draft": [draft], "ngram": [NgramProposer(engine.table, 4)]}
    proposers["both"] = proposers["ngram"] + [draft]
    engine.draft_as(Drafting(proposers[kind], Fitful(4, rng, len(proposers[kind])), engine.scheduler))
    assert same(run(engine, requests, arrivals=rng), plain)
    if kind != "ngram":
        assert 0 < sum(engine.stats.accepted_by_place) < sum(engine.stats.drafted_by_place)


@pytest.mark.parametrize("seed", range(3))
def test_fault_03_04_steps_with_drafts_ahead_that_do_not_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = drafting_engine(3, 0.3, max_num_seqs=8)
    failed: list[bool] = []

    def fail_sometimes(step: StepInput, future: FutureTokens | None) -> None:
        is_after_drafts = future is not None and future.rejected is not None
        if len(step.token_id_T) > 2 and rng.random() < (0.3 if is_after_drafts else 0.05):
            failed.append(is_after_drafts)
            raise MemoryError

    before_each_step(engine, fail_sometimes)
    requests = random_requests(rng, 40, 64)
    check_tokens(run(engine, requests, arrivals=rng), requests)
    assert engine.stats.num_out_of_memory == len(failed)
    assert any(failed), "behind drafts in flight"


def test_fault_49_nan_logits_among_drafts_in_flight_end_their_row_only() -> None:
    ended = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        engine = hash_engine(60, 4, bad_token=13, is_asynchronous=True, max_num_batched_tokens=64)
        proposer = draft_with_itself(engine, 4)
        proposer.runner.is_asynchronous = True
        engine.draft_as(Drafting([proposer], FixedDrafts(4), engine.scheduler))
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


def test_a_request_is_aborted_while_its_drafts_are_checked() -> None:
    engine = drafting_engine(4, 0.3)
    requests = greedy_rows(4, 40)
    for request in requests:
        engine.add(request)
    done = engine.step() + engine.step() + engine.step()
    assert engine.abort(2)
    while engine.has_unfinished:
        done += engine.step()
    check_tokens({c.row_id: c for c in done}, [requests[n] for n in (0, 1, 3)])
    assert engine.pool.num_held == 0


def test_a_runner_that_corrects_nothing_is_waited_for() -> None:
    """As one without captured steps: it reads contexts on the host."""
    engine = drafting_engine(4, 0.3)
    seen = watched(engine)
    engine.runner.max_corrected_queries = 0

    def is_as_planned(step: StepInput, future: FutureTokens | None) -> None:
        assert future is None or future.rejected is None

    before_each_step(engine, is_as_planned)
    check_tokens(run(engine, greedy_rows(6)), greedy_rows(6))
    assert sum(engine.stats.accepted_by_place) > 0
    assert any(late for _, late in seen), "drafts of one step go to the target without the host all the same"


def test_penalties_of_a_draft_model_count_its_own_drafts() -> None:
    """Drafts that have the target's distribution are all accepted."""
    engine = drafting_engine(4)
    params = [{"repetition_penalty": 3.0}, {"frequency_penalty": 2.0, "presence_penalty": 0.5}, {"min_tokens": 9}]
    requests = [
        replace(r, params=replace(r.params, **params[n % 3]))
        for n, r in enumerate(greedy_rows(6, 40))  # type: ignore[arg-type]
    ]
    done = run(engine, requests)
    plain = run(hash_engine(120, 4, max_num_batched_tokens=64), requests)
    assert same(done, plain)
    assert engine.stats.accepted_by_place == engine.stats.drafted_by_place
    assert engine.stats.drafted_4 > 10
