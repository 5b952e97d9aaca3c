"""What plain steps cost is what they cost in a row, not behind drafts, prompts, or a look; and one wild time decides
nothing."""

import numpy as np
import pytest

from pipeline.engine.propose.policy import StepFacts, StepOutcome
from pipeline.engine.speculation.acceptance import DRAFT_MODEL, NGRAM
from pipeline.engine.speculation.controlled import ControlledDrafts
from pipeline.engine.speculation.controller import LOOKS_A_TRIAL, SHADOWS_A_LOOK, Controller
from pipeline.engine.speculation.messages import Batch, Outcome
from pipeline.engine.speculation.proposing import ProposingCost
from tests.engine.speculation.test_controller import MEMORY_BOUND, NGRAM_COST, K, batch_of, controller_of, everything

PLAIN_S = 10e-3


def run_on(controller: Controller, batch: Batch, steps: int, drafted_s: float, cold: tuple[float, ...]) -> int:
    """Steps in which one of K drafts is accepted, and whose time is drafted_s, or PLAIN_S times `cold` in the first
    ones behind drafts. Returns in how many there were drafts."""
    drafted_steps, since_drafts, num = 0, 0, batch.num_sequences
    for _ in range(steps):
        drafted_S = np.zeros(num, dtype=np.int64)
        if controller.wants_candidates(batch) is not None:
            drafted_S = controller.choose(batch, everything(num)).length_S
        if drafted_S.any():
            accepted_S = np.minimum(drafted_S, 1)
            controller.observe(batch, Outcome(drafted_s, num + int(accepted_S.sum()), drafted_S, accepted_S, 1e-5))
            since_drafts = 0
            drafted_steps += 1
            continue
        factor = cold[since_drafts] if since_drafts < len(cold) else 1.0
        since_drafts += 1
        controller.observe(batch, Outcome(PLAIN_S * factor, num))
    return drafted_steps


def test_plain_steps_that_are_slow_behind_drafts_do_not_make_drafts_look_good() -> None:
    """Two tokens for 2.2 plain steps lose a tenth, and would gain a third against the first plain ones behind them."""
    controller, batch = controller_of((8.0, 0.5)), batch_of(4)
    run_on(controller, batch, 400, 2.2 * PLAIN_S, cold=(1.5, 1.3))
    assert controller.cost.step_s(4, batch.kv_tokens) == pytest.approx(PLAIN_S, rel=0.06)
    assert run_on(controller, batch, 200, 2.2 * PLAIN_S, cold=(1.5, 1.3)) < 40


def test_plain_steps_behind_prompts_are_not_timed() -> None:
    controller, batch, told = controller_of(MEMORY_BOUND), batch_of(4), []
    controller.cost.observe = lambda *parts: told.append(parts[-1])  # type: ignore[method-assign]
    for prompt in (1, 0, 0, 1, 0, 0, 0, 0):
        controller.observe(batch_of(4, num_prefill=60) if prompt else batch, Outcome(PLAIN_S, 4))
    assert len(told) == 2


def test_steps_that_pass_are_timed_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is looked at takes three times as long as the others; it is these that count."""
    controller = controller_of((0.0, 10.0))  # nobody would draft
    policy, now_ns, none = ControlledDrafts(controller), 0, np.zeros(1, dtype=np.int64)
    monkeypatch.setattr("time.perf_counter_ns", lambda: now_ns)
    for _ in range(300):
        facts = StepFacts(np.arange(1), np.full(1, 100), 1, 0, 0, 1000, 0)
        if policy.passes(1, 1):
            now_ns += 10_000_000
            continue
        assert policy.proposer(facts) is None
        now_ns += 30_000_000
        policy.observe(StepOutcome(facts, 1, 30_000, 0, 0, none, none))
    assert controller.cost.step_s(1, 100) == pytest.approx(PLAIN_S, rel=0.05)


@pytest.mark.parametrize("passes", [False, True])
def test_one_wild_time_of_proposing_does_not_end_it(passes: bool) -> None:
    """As of a machine that was away for a moment in the first step with drafts."""
    cost = ProposingCost(0.0, 0.0, [1, 64], [1e-3] * 2) if passes else ProposingCost(1e-3, 0.0)
    controller, batch = controller_of(MEMORY_BOUND, (DRAFT_MODEL if passes else NGRAM,), (cost,)), batch_of(4)
    drafted_steps = 0
    for _ in range(60):
        drafted_S = np.zeros(4, dtype=np.int64)
        if controller.wants_candidates(batch) is not None:
            drafted_S = controller.choose(batch, everything(4)).length_S
        if not drafted_S.any():
            controller.observe(batch, Outcome(PLAIN_S, 4))
            continue
        drafted_steps += 1
        usual_s = 4e-3 if passes else 1e-3
        propose_s = usual_s if drafted_steps > 2 or (not passes and drafted_steps == 1) else 0.2
        step_s = controller.cost.step_s(4, batch.kv_tokens, 0, int(drafted_S.sum()))
        lookup_s = 0.0 if passes else propose_s
        controller.observe(batch, Outcome(step_s, 4 + 2 * 4, drafted_S, np.minimum(drafted_S, 2), propose_s, lookup_s))
    assert drafted_steps > 35


def test_drafts_are_tried_where_offers_that_were_compared_leave_hope() -> None:
    """Of those that are compared one in three comes true, which would not quite pay; drafts are accepted."""
    dear, batch, rng = (5.0, 2.2), batch_of(1), np.random.default_rng(0)
    controller = Controller(controller_of(dear).cost, [NGRAM], [NGRAM_COST], K)
    controller.beliefs.acceptance.observe(np.full(24, 3), np.full(24, K), np.where(rng.random(24) < 0.3, 1, 0))
    compared, tried, was_on_trial, begun = 0, False, False, 0
    for _ in range(1500):
        if controller.passes(1):
            continue
        drafted_S = np.zeros(1, dtype=np.int64)
        if controller.wants_candidates(batch) is not None:
            drafted_S = controller.choose(batch, everything(1)).length_S
        step_s = controller.cost.step_s(1, batch.kv_tokens, 0, int(drafted_S.sum()))
        if drafted_S.any():
            assert compared >= LOOKS_A_TRIAL * SHADOWS_A_LOOK
            was_on_trial = controller._trial.is_on
            begun += was_on_trial
            controller.observe(batch, Outcome(step_s, 1 + int(drafted_S[0]), drafted_S, drafted_S, 1e-5))
            if was_on_trial and not controller._trial.is_on:
                tried = True
                assert controller.is_on, "it has paid"
            continue
        controller.observe(batch, Outcome(step_s, 1))
        if controller.shadows(batch) is not None:
            compared += 1
            controller.foretold(everything(1), np.array([K]), np.array([K if rng.random() < 0.33 else 0]), False)
    assert tried
    assert begun > 20
    assert controller.is_on
