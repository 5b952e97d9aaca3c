"""Single decisions of the controller: when it drafts, whose tokens, and what it says of it afterwards."""

import time

import numpy as np
import pytest

from pipeline.engine.speculation.acceptance import DRAFT_MODEL, NGRAM
from pipeline.engine.speculation.budget import GRANT_STEPS
from pipeline.engine.speculation.checks import CHECK_STEPS
from pipeline.engine.speculation.controller import (
    CATCH_UP_STEPS,
    FIRST_PLAIN_STEPS,
    MAX_LOOK_STEPS,
    PAUSE_STEPS,
    SHADOWS_A_LOOK,
    Controller,
)
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.messages import Batch, Candidates, Outcome
from pipeline.engine.speculation.proposing import ProposingCost

K = 4
GRID = [1, 2, 1024]


def table(step_ms: float, token_ms: float) -> StepCost:
    times_s = [1e-3 * (step_ms + token_ms * tokens) for tokens in GRID]
    return StepCost(GRID, [[times_s] * 2] * 3, (64, 1024))


MEMORY_BOUND, COMPUTE_BOUND = (10.0, 0.01), (0.1, 1.0)
NGRAM_COST = ProposingCost(10e-6, 1e-6)


def controller_of(cost: tuple[float, float], proposers=(NGRAM,), proposing=(NGRAM_COST,)) -> Controller:
    return Controller(table(*cost), proposers, proposing, K)


def batch_of(num: int, **options: int) -> Batch:
    return Batch(num, 100 * num, **({"room": 10_000} | options))


def everything(num: int, match_length: int = 7) -> Candidates:
    return Candidates(np.full(num, K), np.full(num, match_length))


def step(controller: Controller, batch: Batch, accepted_share: float, match_length: int = 7):
    """One step in which everybody has candidates, of whose K tokens the first `accepted_share` would be accepted.
    Returns the choice, None when nobody was asked."""
    choice, propose_s = None, 0.0
    num = batch.num_sequences
    drafted_S = accepted_S = np.zeros(num, dtype=np.int64)
    asked = controller.wants_candidates(batch)
    if asked is not None:
        choice = controller.choose(batch, everything(num, match_length))
        cost = controller.proposing[asked]
        passes_K = np.array([int((choice.length_S > k).sum()) for k in range(K)])
        propose_s = cost.lookup_s(num) + float(cost.pass_s(passes_K).sum())
        drafted_S = choice.length_S
        accepted_S = np.minimum(drafted_S, round(K * accepted_share))
    drafts = int(drafted_S.sum())
    step_s = controller.cost.step_s(num, batch.kv_tokens, batch.num_prefill, drafts)
    generated = num + int(accepted_S.sum())
    if drafts:
        controller.observe(batch, Outcome(step_s, generated, drafted_S, accepted_S, propose_s))
    else:
        controller.observe(batch, Outcome(step_s, generated, propose_s=propose_s))
    return choice


def drafts_in(controller: Controller, batch: Batch, steps: int, accepted_share: float = 1.0, **options: int) -> int:
    """In how many of the steps there were drafts."""
    choices = [step(controller, batch, accepted_share, **options) for _ in range(steps)]
    return sum(choice is not None and bool(choice.length_S.any()) for choice in choices)


def test_it_drafts_all_there_is_where_tokens_are_free_and_nothing_where_they_are_not() -> None:
    assert drafts_in(controller_of(MEMORY_BOUND), batch_of(4), 50) >= 40
    assert drafts_in(controller_of(COMPUTE_BOUND), batch_of(4), 50) == 0


def test_room_and_what_a_sequence_has_are_kept_to() -> None:
    controller, batch = controller_of(MEMORY_BOUND), batch_of(4, room=5)
    for _ in range(20):
        choice = step(controller, batch, 1.0)
    assert choice is not None
    assert choice.length_S.sum() == 5
    while controller.wants_candidates(batch) is None:
        controller.observe(batch, Outcome(0.01, 4))
    choice = controller.choose(batch, Candidates(np.array([0, 1, 0, 3]), np.full(4, 7)))
    assert choice.length_S.tolist() == [0, 1, 0, 3]
    assert controller.wants_candidates(batch_of(4, room=0)) is None
    assert controller.wants_candidates(batch_of(0)) is None


def test_where_prompts_wait_for_room_it_drafts_only_if_tokens_are_free() -> None:
    """Half a millisecond a token beside 20 ms: drafts pay for 4 sequences, but not in the place of prompts."""
    free, dear = controller_of((10.0, 0.001)), controller_of((20.0, 0.5))
    for controller in (free, dear):
        assert drafts_in(controller, batch_of(4), 50) >= 40
    assert drafts_in(free, batch_of(60, num_queued=9), 40) >= 38
    assert drafts_in(dear, batch_of(4, num_prefill=60, num_queued=9), 40) == 0
    assert drafts_in(dear, batch_of(60, num_queued=9), 40) == 0
    assert drafts_in(dear, batch_of(4), 50) >= 40


def test_beside_prompts_that_have_room_drafts_are_judged_by_what_they_add() -> None:
    """Prompts are computed with drafts or without, however many tokens they are: the same steps pay beside them, at the
    same gain, and none where tokens cost what they bring."""
    for num_prefill in (1, 60, 3000):
        dear, never = controller_of((20.0, 0.5)), controller_of(COMPUTE_BOUND)
        beside = batch_of(4, num_prefill=num_prefill)
        assert drafts_in(dear, beside, 50) >= 40
        assert drafts_in(never, beside, 50) == 0
        counts = dear.counts
        each_us = (counts.plain_us - counts.spent_us).sum() / counts.drafted_steps.sum()
        alone = controller_of((20.0, 0.5))
        drafts_in(alone, batch_of(4), 50)
        alone_us = (alone.counts.plain_us - alone.counts.spent_us).sum() / alone.counts.drafted_steps.sum()
        assert each_us == pytest.approx(alone_us, rel=0.05)


def test_what_prompts_took_is_not_put_to_drafts() -> None:
    """They take longer than the table says, and a trial does not end by steps with them."""
    controller, beside = controller_of((20.0, 0.5)), batch_of(4, num_prefill=600)
    assert drafts_in(controller, batch_of(4), 20) > 10
    before, balance_s = controller.counts, controller.budget.balance_s
    assert controller.wants_candidates(beside) == 0
    choice = controller.choose(beside, everything(4))
    controller.observe(beside, Outcome(30.0, 4 + int(choice.length_S.sum()), choice.length_S, choice.length_S, 1e-5))
    spent_us = (controller.counts.spent_us - before.spent_us).sum()
    assert spent_us == pytest.approx(1e6 * controller.cost.step_s(4, 400, 0, int(choice.length_S.sum())), rel=0.05)
    assert controller.budget.balance_s >= balance_s
    controller._trial.begin(4)
    left = controller._trial._left + controller._trial._first
    controller.is_on = False
    assert controller.wants_candidates(beside) == 0
    choice = controller.choose(beside, everything(4))
    controller.observe(beside, Outcome(30.0, 4 + int(choice.length_S.sum()), choice.length_S, choice.length_S, 1e-5))
    assert controller._trial._left + controller._trial._first == left


def test_it_goes_off_when_nothing_is_accepted_and_asks_seldom_then() -> None:
    controller, batch = controller_of((10.0, 0.3)), batch_of(4)
    assert drafts_in(controller, batch, 50) >= 40
    drafts_in(controller, batch, 300, accepted_share=0.0)
    assert not controller.is_on
    asked = sum(step(controller, batch, 0.0) is not None for _ in range(1000))
    assert 1000 // (2 * MAX_LOOK_STEPS) <= asked <= 400


def test_it_comes_back_when_drafts_are_accepted_again() -> None:
    controller, batch = controller_of((10.0, 0.3)), batch_of(4)
    drafts_in(controller, batch, 400, accepted_share=0.0)
    assert not controller.is_on
    drafts_in(controller, batch, 1500, accepted_share=1.0)
    assert controller.is_on
    assert drafts_in(controller, batch, 100, accepted_share=1.0) >= 90


def test_a_small_gain_neither_switches_it_on_nor_off() -> None:
    """Acceptance such that drafting gains about 3.5%: under 5%, over 2%."""
    cost = (10.0, 0.01)
    controller = controller_of(cost)
    controller.beliefs.acceptance.probability = lambda: np.full((4, K), 0.034)  # type: ignore[method-assign]
    controller.beliefs.acceptance.upper = lambda *_: np.full((4, K), 0.034)  # type: ignore[method-assign]
    assert drafts_in(controller, batch_of(1), 100) == 0
    controller.is_on = True
    assert drafts_in(controller, batch_of(1), 100) >= 85


def test_a_batch_that_shrinks_switches_it_on_without_a_probe() -> None:
    """The tail of a job: what is known of acceptance says that a single sequence pays where 120 do not."""
    controller = controller_of((10.0, 2.0))
    controller.beliefs.acceptance.observe(np.full(200, 3), np.full(200, K), np.full(200, 2))
    assert drafts_in(controller, batch_of(120), 60, accepted_share=0.5) == 0
    before = int(controller.counts.probe_steps.sum())
    assert drafts_in(controller, batch_of(1), 20, accepted_share=0.5) >= 14
    assert int(controller.counts.probe_steps.sum()) == before


def test_a_batch_that_grows_is_not_looked_at_but_is_when_it_shrinks_from_there() -> None:
    """As where a job begins with few rows and its last ones are few again."""
    controller = controller_of((10.0, 2.0))
    drafts_in(controller, batch_of(8), 200, accepted_share=0.0)  # looks are far between by now
    looks, look = [], controller._goes_on_again
    controller._goes_on_again = lambda batch: (looks.append(batch.num_sequences), look(batch))[1]  # type: ignore[method-assign]
    controller._look_at = controller._num_steps + 10_000
    for num in (8, 64, 100, 80, 74, 60):
        drafts_in(controller, batch_of(num), 3, accepted_share=0.0)
        controller._look_at = controller._num_steps + 10_000
    assert looks[0] == 74
    assert 80 not in looks


def test_now_and_then_a_plain_step_says_what_plain_steps_cost() -> None:
    controller = controller_of(MEMORY_BOUND)
    steps = 4 * CHECK_STEPS
    assert steps - 12 <= drafts_in(controller, batch_of(4), steps) <= steps - 5


def asked_in(controller: Controller, steps: int, share_P: tuple[float, float]) -> list[int | None]:
    """Who drafted in each step, where the drafts of proposer p are accepted by share_P[p]."""
    told: list[int | None] = []
    for _ in range(steps):
        choose, batch = controller.choose, batch_of(4)
        choice = step(controller, batch, share_P[controller._at_work if controller._trying is None else 1])
        told.append(choice.proposer if choice is not None and choice.length_S.any() else None)
        assert controller.choose == choose
    return told


def both(pass_ms: float) -> Controller:
    passes = ProposingCost(0.0, 0.0, [1, 64], [1e-3 * pass_ms] * 2)
    return controller_of(MEMORY_BOUND, (NGRAM, DRAFT_MODEL), (NGRAM_COST, passes))


def test_a_proposer_that_costs_too_much_is_not_asked() -> None:
    assert asked_in(both(pass_ms=9.0), 300, (1.0, 1.0)).count(1) == 0


def test_the_better_proposer_comes_to_work() -> None:
    """Looking up is tried first, being cheap, and gets nothing right; the draft model is right."""
    told = asked_in(both(pass_ms=0.5), 800, (0.25, 1.0))
    assert told[FIRST_PLAIN_STEPS] == 0
    assert told[-300:].count(1) > 280


def test_disturbed_steps_do_not_switch_it_off() -> None:
    controller, batch = controller_of(MEMORY_BOUND), batch_of(4)
    observe = controller.observe
    count = 0

    def disturbed(batch: Batch, outcome: Outcome) -> None:
        nonlocal count
        count += 1
        factor = 20.0 if count % 10 == 0 else 1.0
        parts = outcome.drafted_S, outcome.accepted_S, outcome.propose_s
        observe(batch, Outcome(outcome.step_s * factor, outcome.num_generated, *parts))

    controller.observe = disturbed  # type: ignore[method-assign]
    assert drafts_in(controller, batch, 500) >= 480


def test_what_it_did_is_counted_by_batch_size() -> None:
    controller = controller_of(MEMORY_BOUND)
    drafted_small = drafts_in(controller, batch_of(2), 40)
    drafted_large = drafts_in(controller, batch_of(9), 30)
    small, large = controller.counts.lines()
    assert (small.batch, large.batch) == ("2-3", "8-15")
    assert small.drafted_steps == drafted_small
    assert small.plain_steps == 40 - drafted_small
    assert large.drafted_steps == drafted_large
    assert large.plain_steps == 30 - drafted_large
    assert small.draft_tokens == small.accepted_tokens == 2 * K * drafted_small
    assert large.tokens_per_sequence_step == 1 + K
    assert small.on_steps >= drafted_small
    plain_s = controller.cost.step_s(9, 900)
    drafted_s = controller.cost.step_s(9, 900, 0, 9 * K)
    assert large.saved_s == pytest.approx(drafted_large * ((1 + K) * plain_s - drafted_s), rel=0.02)
    assert controller.counts.saved_s == pytest.approx(small.saved_s + large.saved_s)


def test_a_decision_costs_little() -> None:
    """The best of many, so that a busy machine does not fail it; what it takes on a quiet one is under 100 us."""
    controller, batch, rng = controller_of(MEMORY_BOUND), batch_of(128), np.random.default_rng(0)
    times_s = []
    controller.observe(batch, Outcome(0.011, 128))
    controller.foretold(everything(128), *np.full((2, 128), K), is_rest=False)
    for _ in range(200):
        candidates = Candidates(rng.integers(0, K + 1, 128), rng.integers(0, 9, 128))
        before = time.perf_counter()
        if controller.wants_candidates(batch) is not None:
            drafted_S = controller.choose(batch, candidates).length_S
            times_s.append(time.perf_counter() - before)
            controller.observe(batch, Outcome(0.012, 128 + int(drafted_S.sum()), drafted_S, drafted_S, 1e-4))
        else:
            controller.observe(batch, Outcome(0.011, 128))
    assert len(times_s) > 150
    assert min(times_s) < 300e-6


def test_steps_that_pass_are_counted_and_some_are_looked_at() -> None:
    controller, batch = controller_of(COMPUTE_BOUND), batch_of(8)
    drafts_in(controller, batch, 40)
    before = int(controller.counts.plain_steps.sum())
    settle, elapsed, passed = controller.budget.settle, [0.0], 0
    controller.budget.settle = lambda s, *rest: (elapsed.append(s), accept_or_replace(s, *rest))[1]  # type: ignore[method-assign]
    for _ in range(100):
        if controller.passes(8):
            passed += 1
        else:
            step(controller, batch, 0.0)
    assert 75 <= passed <= 87
    assert sum(elapsed) == pytest.approx(100 * controller.cost.step_s(8, 800), rel=0.1)
    assert int(controller.counts.plain_steps.sum()) == before + 100
    passed = 0
    while controller.passes(1):
        passed += 1
    assert passed <= 20, "a batch that has shrunk is seen when it is its turn"
    on = controller_of(MEMORY_BOUND)
    drafts_in(on, batch, 20)
    assert not on.passes(8)


def test_the_first_lookups_after_a_pause_say_nothing_of_those_to_come() -> None:
    """They catch up with what became known since, which may take as long as some plain steps; later ones do not."""
    lookup, batch, num_pauses, asked_before, pause = ProposingCost(10e-6, 0.0), batch_of(1), 0, 0, PAUSE_STEPS
    controller = controller_of(MEMORY_BOUND, proposing=(lookup,))
    for _ in range(6000):
        pause += 1
        if controller.passes(1):
            continue
        plain_s, none = controller.cost.step_s(1, batch.kv_tokens), np.zeros(1, dtype=np.int64)
        if controller.wants_candidates(batch) is None:
            controller.observe(batch, Outcome(plain_s, 1))
            continue
        if pause > PAUSE_STEPS:
            num_pauses, asked_before = num_pauses + 1, 0
        drafted_S = controller.choose(batch, everything(1)).length_S
        step_s = controller.cost.step_s(1, batch.kv_tokens, 0, int(drafted_S.sum()))
        lookup_s = 20e-6 if asked_before >= CATCH_UP_STEPS else 5e-3
        drafts = (drafted_S, none) if drafted_S.any() else (None, None)
        controller.observe(batch, Outcome(step_s, 1, *drafts, propose_s=lookup_s, lookup_s=lookup_s))
        asked_before, pause = asked_before + 1, 0
    assert num_pauses >= 8
    assert lookup.lookup_s(1) < 30e-6
    on = controller_of(MEMORY_BOUND, proposing=(lookup,))
    asked_before = 0
    for _ in range(80):
        drafted_S = np.zeros(1, dtype=np.int64)
        if on.wants_candidates(batch) is not None:
            drafted_S = on.choose(batch, everything(1)).length_S
            asked_before += 1
        lookup_s = 0.0 if not drafted_S.any() else 20e-6 if asked_before > CATCH_UP_STEPS else 1e-3
        step_s = on.cost.step_s(1, batch.kv_tokens, 0, int(drafted_S.sum()))
        drafts = (drafted_S, drafted_S) if drafted_S.any() else (None, None)
        on.observe(batch, Outcome(step_s, 1 + int(drafted_S.sum()), *drafts, propose_s=lookup_s, lookup_s=lookup_s))
    assert on.is_on
    assert lookup.lookup_s(1) == pytest.approx(20e-6)


DEAR = (5.0, 10.0)  # a draft has to be accepted more often than is believed at the start


def shadowed_steps(controller: Controller, steps: int, agreed: int, match_length: int = 7) -> list[int]:
    """Steps of one sequence; wherever its offer of K tokens is wanted, `agreed` of them come. Returns the steps after
    which it was."""
    batch, asked = batch_of(1), []
    for n in range(steps):
        if not controller.passes(1):
            step(controller, batch, agreed / K, match_length)
            if controller.shadows(batch) is not None:
                asked.append(n)
                controller.foretold(everything(1, match_length), np.array([K]), np.array([agreed]), is_rest=False)
    return asked


def test_offers_that_come_true_switch_it_on_without_a_probe() -> None:
    lucky, unlucky = controller_of(DEAR), controller_of(DEAR)
    asked = shadowed_steps(lucky, 400, agreed=K)
    assert lucky.is_on
    assert 1 <= len(asked) <= 20
    assert int(lucky.counts.drafted_steps.sum()) > 300
    asked = shadowed_steps(unlucky, 400, agreed=0)
    assert 40 <= len(asked) <= 75
    assert int(unlucky.counts.drafted_steps.sum()) == 0
    assert not unlucky.is_on


def test_offers_are_compared_where_drafts_could_pay_and_nobody_drafts() -> None:
    assert len(shadowed_steps(controller_of(COMPUTE_BOUND), 200, agreed=K)) == 0
    on = controller_of(MEMORY_BOUND)
    drafts_in(on, batch_of(1), 20)
    assert on.is_on
    assert shadowed_steps(on, 50, agreed=K) == []
    passes = ProposingCost(0.0, 0.0, [1, 64], [1e-3] * 2)
    assert shadowed_steps(controller_of(DEAR, (DRAFT_MODEL,), (passes,)), 200, agreed=K) == []
    both = controller_of(DEAR, (DRAFT_MODEL, NGRAM), (passes, NGRAM_COST))
    both.budget.open(0.01)
    assert both.shadows(batch_of(1)) == 1
    assert both.shadows(batch_of(1, num_prefill=60, num_queued=9)) is None
    assert both.shadows(batch_of(0)) is None
    assert both.shadows(batch_of(1, num_prefill=60, room=0)) is None


def test_what_was_foretold_counts_like_drafts() -> None:
    """In the same estimates; how many had what to offer is remembered, unless they are some of the others."""
    one, other, rng = controller_of(DEAR), controller_of(DEAR), np.random.default_rng(0)
    for _ in range(40):
        available_S, match_S = rng.integers(0, K + 1, 6), rng.integers(0, 9, 6)
        decided_S = np.minimum(rng.integers(0, K + 1, 6), available_S)
        agreed_S = np.minimum(rng.integers(0, K + 1, 6), decided_S)
        one.foretold(Candidates(available_S, match_S), decided_S, agreed_S, is_rest=False)
        other.beliefs.acceptance.observe(other.beliefs.acceptance.class_of(0, match_S), decided_S, agreed_S)
    assert one.beliefs.acceptance.probability() == pytest.approx(other.beliefs.acceptance.probability())
    assert one.beliefs.acceptance.probability()[0] != pytest.approx(
        controller_of(DEAR).beliefs.acceptance.probability()[0]
    )
    shares = one.beliefs.lately[0].share_CK
    assert 0.5 < shares[:, 0].sum() < 1.0 > shares[:, K - 1].sum()
    one.foretold(everything(6), np.full(6, K), np.full(6, K), is_rest=True)
    assert one.beliefs.lately[0].share_CK is shares


def test_a_class_that_had_no_luck_is_drafted_again_when_its_offers_come_true() -> None:
    controller, batch = controller_of((10.0, 1.0)), batch_of(2)
    drafts_in(controller, batch, 30)
    controller.beliefs.acceptance.observe(np.full(60, 1), np.full(60, K), np.zeros(60, dtype=np.int64))
    half = Candidates(np.full(2, K), np.array([7, 3]))
    lengths, asked, wanted = [], 0, 0
    for _ in range(400):
        if controller.wants_candidates(batch) is None:
            controller.observe(batch, Outcome(0.012, 2))
            continue
        length_S = controller.choose(batch, half).length_S
        lengths.append(int(length_S[1]))
        assert length_S[0] > 0
        wants_rest = controller.shadows_rest()
        wanted += wants_rest
        if wants_rest and length_S[1] == 0:
            asked += 1
            controller.foretold(Candidates(half.available_S[1:], half.match_length_S[1:]), *np.full((2, 1), K), True)
        step_s = controller.cost.step_s(2, batch.kv_tokens, 0, int(length_S.sum()))
        controller.observe(batch, Outcome(step_s, 2 + int(length_S.sum()), length_S, length_S, 1e-5))
    assert max(lengths[4:12]) == 0
    assert lengths[-1] == K
    assert 5 <= asked <= wanted <= 51


def test_what_was_granted_is_not_spent_on_probes_of_who_is_compared() -> None:
    """Prior beliefs leave hope, and nothing comes to be known; only a rich account pays for a probe."""
    probes = []
    for gained_s in (0.0, 0.5):
        controller = controller_of((8.0, 7.0))
        controller.budget.open(0.015)
        controller.budget.accept_or_replace(0.0, gained_s, 0.015)
        drafts_in(controller, batch_of(1), 400, accepted_share=0.0)
        probes.append(int(controller.counts.probe_steps.sum()))
    assert probes[0] == 0 < probes[1]


def test_when_some_offers_have_come_true_it_goes_on_before_the_next_look() -> None:
    controller, batch = controller_of(DEAR), batch_of(1)
    drafts_in(controller, batch, 20)
    controller._look_at = controller._num_steps + 10_000
    for _ in range(SHADOWS_A_LOOK):
        assert controller.wants_candidates(batch) is None
        controller.observe(batch, Outcome(0.015, 1))
        controller.foretold(everything(1), np.array([K]), np.array([K]), is_rest=False)
    assert not controller.passes(1)
    assert controller.wants_candidates(batch) == 0
    assert controller.is_on


def test_many_offers_at_once_count_as_those_of_many_steps() -> None:
    once, often = controller_of(MEMORY_BOUND), controller_of(MEMORY_BOUND)
    none = Candidates(np.zeros(48, dtype=np.int64), np.zeros(48, dtype=np.int64))
    for controller, times in ((once, 1), (often, 6)):
        controller.budget.open(0.01)
        assert controller.shadows(batch_of(8)) == 0
        controller.foretold(everything(8), np.full(8, K), np.full(8, K), is_rest=False)
        for _ in range(times):
            some = Candidates(*(part[: 48 // times] for part in (none.available_S, none.match_length_S)))
            controller.foretold(some, *(some.available_S,) * 2, is_rest=False)
    assert once.beliefs.lately[0].present == pytest.approx(often.beliefs.lately[0].present)
    assert once.beliefs.lately[0].present == pytest.approx(1 / 7)


def test_prompts_in_the_first_step_do_not_raise_what_is_granted() -> None:
    controller, batch = controller_of((10.0, 1.0)), batch_of(4, num_prefill=900)
    controller.observe(batch, Outcome(controller.cost.step_s(4, 400, 900), 4))
    assert controller.budget.balance_s < (GRANT_STEPS + 0.5) * controller.cost.step_s(4, 400)


def test_a_split_that_the_account_cannot_pay_any_more_is_not_taken_again() -> None:
    controller, batch = controller_of((10.0, 3.0)), batch_of(4)
    gains, budget = controller.gains, controller.budget
    budget.open(0.02)
    budget.accept_or_replace(0.0, 0.4, 0.02)
    deep_CK = np.zeros((4, K), dtype=np.int64)
    deep_CK[3] = 4
    rich = gains.split(batch, 0, deep_CK, controller.beliefs.values, 0.0)
    assert gains.split(batch, 0, deep_CK, controller.beliefs.values, 0.0) is rich
    budget.balance_s = 0.02
    poor = gains.split(batch, 0, deep_CK, controller.beliefs.values, 0.0)
    assert 0 < poor.num_drafts < rich.num_drafts
    assert poor.seconds - poor.plain_s <= budget.affordable_s
