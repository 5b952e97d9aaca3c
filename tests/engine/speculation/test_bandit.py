"""The policy that measures: what it drafts, what it is told, and what it forgets."""

import numpy as np
import pytest

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import Offer, StepFacts, StepOutcome, Verdict
from pipeline.engine.drafts.replay import replay
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.speculation.arms import OFF
from pipeline.engine.speculation.bandit import (
    EARLY_REPLAY_SHARE,
    EARLY_STEPS,
    FIRST_DEPTH,
    FIRST_STEPS,
    WARM_UP,
    MeasuredDrafts,
)
from pipeline.engine.speculation.contest import ALARM
from pipeline.engine.speculation.record import SpeculationCounts
from tests.engine.drafts.test_draft_model import draft_with_itself
from tests.engine.hash_runner import expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run

K = 4


class Driven:
    """A policy for one lookup proposer whose offers are all accepted, on a clock that steps drive."""

    def __init__(self, accepted: int = K, drafted_s: float = 0.012, plain_s: float = 0.01, in_flight: int = 0) -> None:
        self.now_ns, self.accepted, self.in_flight = 0, accepted, in_flight
        self.drafted_s, self.plain_s = drafted_s, plain_s
        self.policy = MeasuredDrafts(
            [lambda: (np.arange(8), self.accepted_of(np.arange(8)))], K, clock=lambda: self.now_ns
        )
        for slot in range(8):
            self.policy.admitted(slot)
        self.waiting: list[tuple[StepOutcome, float]] = []
        self.accepted_S: np.ndarray | None = None  # by slot, else all alike
        self.num_waiting = 1
        self.drafted: list[np.ndarray] = []

    def accepted_of(self, slot_S: np.ndarray) -> np.ndarray:
        return np.full(len(slot_S), self.accepted) if self.accepted_S is None else self.accepted_S[slot_S]

    def step(self, num: int = 8, room: int = 1000, num_prefill: int = 0, seconds: float = 0.0) -> bool:
        """Whether it drafted."""
        facts, slot_S = StepFacts(num, num_prefill, room, self.num_waiting), np.arange(num)
        number, verdict = self.policy.select(facts), None
        if number is not None:
            offer = Offer(slot_S, np.full(num, K), np.full(num, 7), np.zeros((num, 0), dtype=np.int64))
            count_S = self.policy.depths(facts, offer)
            some = np.flatnonzero(count_S)
            if len(some):
                verdict = Verdict(slot_S[some], count_S[some], np.minimum(count_S[some], self.accepted_of(some)))
            self.drafted.append(count_S)
        generated = num + (0 if verdict is None else int(verdict.accepted_D.sum()))
        took_s = seconds or (self.drafted_s if verdict is not None else self.plain_s)
        self.waiting.append((StepOutcome(facts, generated, verdict), took_s))
        while len(self.waiting) > self.in_flight:
            outcome, took_s = self.waiting.pop(0)
            self.now_ns += round(1e9 * took_s)
            self.policy.observe(outcome)
        return verdict is not None

    def share(self, num_steps: int, **options: int) -> float:
        return sum(self.step(**options) for _ in range(num_steps)) / num_steps

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts.from_flat(self.policy.counters())


def test_it_drafts_soon_where_drafts_pay_and_goes_on_with_it() -> None:
    driven = Driven()
    assert driven.share(FIRST_STEPS) == 0.0, "there is no text yet to draft from"
    assert driven.share(8) > 0.5
    assert driven.share(400) > 0.97


@pytest.mark.parametrize("options", [{"accepted": 0}, {"drafted_s": 0.1}])
def test_where_drafts_do_not_pay_hardly_any_are_made(options: dict) -> None:
    driven = Driven(**options)
    assert driven.share(2000) < 0.02


def test_it_stops_when_drafts_do_not_pay_any_more_and_begins_again() -> None:
    driven = Driven()
    driven.share(100)
    driven.accepted = 0
    driven.share(300)
    assert driven.share(300) < 0.1
    driven.accepted = K
    driven.share(100)
    assert driven.share(100) > 0.8


def test_drafts_that_lose_a_little_in_every_step_are_noticed() -> None:
    """Each loses the half of a plain step, soon after they were faster."""
    driven = Driven(drafted_s=0.042)
    driven.share(FIRST_STEPS + 60)
    assert driven.share(20) == 1.0
    driven.drafted_s = 0.055
    steps = next(n for n in range(200) if not driven.step())
    assert steps == pytest.approx(ALARM / 0.5, abs=2)
    driven.share(100)
    assert driven.share(100) < 0.1


def test_a_single_slow_step_is_no_reason_to_doubt() -> None:
    driven = Driven(drafted_s=0.03)
    driven.share(FIRST_STEPS + 60)
    for _ in range(20):
        assert driven.step(seconds=0.3 if _ % 10 == 5 else 0.03)


def test_few_drafts_are_made_until_steps_with_them_were_timed() -> None:
    driven = Driven()
    driven.share(FIRST_STEPS + 40)
    depths = [int(each.max()) for each in driven.drafted]
    assert depths[:WARM_UP] == [FIRST_DEPTH] * WARM_UP
    assert set(depths[WARM_UP:]) == {K}, "no step that is compared has fewer than the next ones"


def test_steps_beside_prompts_of_unknown_price_are_not_charged() -> None:
    """The first prompts beside decoding come with the first drafts, and take ten times as long as a plain step."""
    driven = Driven()
    while driven.policy._contest.challenger is None:
        driven.step()
    assert driven.step(num_prefill=300, seconds=0.1)
    assert driven.policy._account.balance_s > 0.0
    assert driven.share(100) > 0.9


def test_drafts_as_dear_as_prompts_say_are_not_tried() -> None:
    """Of three tokens a step. Drafts of all cost as many prompt tokens: more than a plain step, or a twentieth."""
    shares = []
    for token_s in (1.5e-3, 6e-5):
        driven = Driven(accepted=2, drafted_s=0.01 + 8 * K * token_s)
        for n in range(FIRST_STEPS + 100):
            num_prefill = 40 if n % 4 == 0 else 0
            drafts = driven.policy._contests and driven.policy._contest.active != OFF
            driven.step(num_prefill=num_prefill, seconds=(driven.drafted_s if drafts else 0.01) + token_s * num_prefill)
        shares.append(len(driven.drafted))
    assert shares[0] == 0 < shares[1]


def test_rows_that_are_slow_for_good_decide_once_no_row_waits() -> None:
    """Half of them get nothing from drafts, the others four tokens, and a step with drafts takes twice as long."""
    for num_waiting, expected in ((1, 1.0), (0, 0.0)):
        driven = Driven(accepted=K, drafted_s=0.02)
        driven.accepted_S, driven.num_waiting = np.repeat([0, K], 4), num_waiting
        driven.share(FIRST_STEPS + 60)
        assert driven.share(40) == expected


def test_replays_are_paid_for_by_what_they_take() -> None:
    driven = Driven(accepted=0, plain_s=0.004)
    taken = []

    def replay() -> tuple[np.ndarray, np.ndarray]:
        took_ns = 8_000_000 if taken else 1_000_000
        driven.now_ns += took_ns
        taken.append(took_ns)
        return np.arange(8), np.zeros(8, dtype=np.int64)

    driven.policy._replays = (replay,)
    driven.share(EARLY_STEPS)
    assert 0 < sum(taken) < 1.5 * EARLY_REPLAY_SHARE * driven.now_ns


def test_a_replay_is_not_charged_to_the_drafts_that_follow_it() -> None:
    """It takes ten plain steps here, as it has much to look up: more than is granted."""
    driven = Driven(drafted_s=0.02)

    def replay() -> tuple[np.ndarray, np.ndarray]:
        driven.now_ns += 100_000_000
        return np.arange(8), driven.accepted_of(np.arange(8))

    driven.policy._replays = (replay,)
    driven.share(FIRST_STEPS + 20)
    assert driven.share(20) == 1.0


@pytest.mark.parametrize("in_flight", [0, 1])
def test_what_steps_take_is_told_without_replays_between_them(in_flight: int) -> None:
    """One that runs while a device computes the next step is no time between steps."""
    driven = Driven(accepted=0, in_flight=in_flight)

    def replay() -> tuple[np.ndarray, np.ndarray]:
        driven.now_ns += 2_000_000
        return np.arange(8), np.zeros(8, dtype=np.int64)

    driven.policy._replays = (replay,)
    driven.share(FIRST_STEPS + 20)  # later steps are looked at one in some
    rate = driven.policy._contest.rate(OFF, 0.0)
    assert rate is not None
    assert (rate.step_s > 1.001 * driven.plain_s) == (in_flight > 0)


def test_a_full_step_is_plain_and_says_nothing_of_plain_steps() -> None:
    driven = Driven()
    driven.share(100)
    assert not any(driven.step(room=0, num_prefill=2000, seconds=1.0) for _ in range(50))
    assert driven.share(30) > 0.8


def test_steps_beside_prompts_say_what_a_step_takes_without_them() -> None:
    """Prompts of 300 tokens, 0.1 ms each, in three steps of four: plain steps of 10 ms take 40 then."""
    driven = Driven(drafted_s=0.02)
    for n in range(400):
        prefill = 300 if n % 4 else 0
        drafted = driven.policy._contests and driven.policy._contest.active != OFF
        driven.step(num_prefill=prefill, seconds=(0.02 if drafted else 0.01) + 1e-4 * prefill)
    assert 0.8e-4 < driven.policy._prefill.token_s < 1.2e-4
    assert driven.share(50) > 0.9


def test_a_size_that_was_not_seen_begins_with_the_arm_of_the_last_one() -> None:
    driven = Driven()
    driven.share(100)
    assert driven.share(20, num=2) == 1.0
    assert driven.share(20, num=1) == 1.0


@pytest.mark.parametrize("steps_before", [1, 2])
def test_what_is_accepted_is_followed_where_drafts_are_settled(steps_before: int) -> None:
    driven = Driven()
    driven.share(steps_before, num=2)
    driven.share(200)
    assert driven.policy._acceptance[0].tokens == pytest.approx(1 + K, abs=0.1)
    driven.accepted = 1
    driven.share(600)
    assert driven.share(8) == 1.0
    assert driven.policy._acceptance[0].tokens == pytest.approx(2.0, abs=0.2)


def test_a_batch_that_lacks_a_sequence_is_of_the_same_size() -> None:
    driven = Driven()
    for n in range(40):
        driven.step(num=8 - n % 2)
    assert len(driven.policy._contests) == 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_outcomes_that_come_later_are_of_their_own_step(in_flight: int) -> None:
    driven = Driven(in_flight=in_flight)
    drafted = sum(driven.step() for _ in range(200))
    counts = driven.counts
    assert drafted > 140
    assert abs(counts.of(8).drafted_steps - drafted) <= in_flight
    assert counts.of(8).accepted_tokens == counts.of(8).draft_tokens > 0


def test_a_step_that_was_undone_is_passed_over() -> None:
    driven = Driven()
    for n in range(60):
        if n % 3 == 0:
            driven.policy.select(StepFacts(8, 0, 1000))
        driven.step()
    assert len(driven.policy._steps) == 0
    assert driven.share(20) > 0.8


def test_a_new_sequence_in_a_slot_has_no_history() -> None:
    driven = Driven(drafted_s=0.02)
    driven.share(FIRST_STEPS + 40)
    rows = driven.policy._rows
    slot_S = np.arange(8)
    rows.observe(Verdict(slot_S[5:6], np.array([K]), np.array([0])), 0.3)
    rows.observe(Verdict(slot_S[5:6], np.array([K]), np.array([0])), 0.3)
    assert rows.depths(slot_S)[5] < K
    driven.policy.admitted(5)
    assert rows.depths(slot_S).tolist() == [K] * 8


def test_a_step_that_waited_for_requests_says_nothing() -> None:
    driven = Driven()
    driven.share(200)
    before = driven.policy._contest.rate(0, 0.0)
    driven.step(seconds=5.0)
    assert driven.policy._contest.rate(0, 0.0) == before
    for _ in range(60):
        driven.step(seconds=0.3)
    rate = driven.policy._contest.rate(driven.policy._contest.incumbent, 0.0)
    assert rate is not None
    assert rate.step_s > 0.1, "all of them take that long now"


def test_time_in_which_the_engine_did_something_else_is_no_steps() -> None:
    plain, paused = Driven(), Driven()
    paused.policy.paused(5)  # before the first step
    for number in range(400):
        plain.step()
        if number % 3 == 0:
            paused.now_ns += 60_000_000
            paused.policy.paused(60_000_000)
        paused.step()
    (line,), (expected,) = paused.counts.lines(), plain.counts.lines()
    assert line.drafted_steps > 300
    assert line.saved_s == pytest.approx(expected.saved_s, rel=0.05)


def test_what_was_saved_is_counted() -> None:
    driven = Driven()
    driven.share(200)
    counts = driven.counts
    (line,) = counts.lines()
    assert line.batch == "8-15"
    assert line.drafted_steps + line.plain_steps == 199  # of the first nobody knows when it began
    assert line.on_steps > 130 > line.probe_steps > 0
    plain_s, took_s = 0.01 * (1 + K), 0.012
    assert line.saved_s == pytest.approx(line.drafted_steps * (plain_s - took_s), rel=0.05)


@pytest.mark.parametrize("faster", [0.1, 10.0])
def test_what_was_saved_is_counted_at_the_speed_that_the_machine_has_now(faster: float) -> None:
    """Plain steps were timed when it was busy with something else, or when it was not yet."""
    driven = Driven()
    driven.share(100)
    (before,) = driven.counts.lines()
    driven.plain_s, driven.drafted_s = driven.plain_s / faster, driven.drafted_s / faster
    driven.share(300)
    (after,) = driven.counts.lines()
    steps = after.drafted_steps - before.drafted_steps
    assert steps > 200
    counted = (after.saved_s - before.saved_s) / steps / (driven.plain_s * (1 + K) - driven.drafted_s)
    assert 0.8 < counted < 1.2


@pytest.mark.parametrize("slow", [3.0, 10.0, 100.0])
def test_a_machine_that_becomes_fast_as_drafts_begin_makes_them_save_no_more(slow: float) -> None:
    """Its plain steps were timed while it was slow. A step with drafts computes what a plain one does and more, so a
    plain step of that moment took no longer than the step itself."""
    driven = Driven(plain_s=0.01 * slow)
    while not driven.step():
        pass
    driven.plain_s = 0.01
    driven.share(300)
    (line,) = driven.counts.lines()
    assert line.drafted_steps > 250
    true_s = line.drafted_steps * (0.01 * (1 + K) - 0.012)
    assert 0.8 * true_s < line.saved_s < 1.3 * true_s


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_an_engine_gives_the_tokens_of_plain_steps(seed: int, is_asynchronous: bool) -> None:
    """With both proposers, of which each drafts at some time."""
    engine = hash_engine(120, 4, memory=1, is_asynchronous=is_asynchronous, max_num_batched_tokens=100)
    lookup = NgramProposer(engine.table, K)
    draft = draft_with_itself(engine, K, memory=1)
    draft.runner.is_asynchronous = is_asynchronous
    replays = [lambda: replay(lookup, engine.table, engine.scheduler.running), None]
    rng, now_ns, drafted = np.random.default_rng(seed), 0, set()
    policy = MeasuredDrafts(replays, K, clock=lambda: now_ns)
    engine.draft_as(Drafting([lookup, draft], policy, engine.scheduler))
    select = policy.select

    def select_and_note(facts: StepFacts) -> int | None:
        nonlocal now_ns
        now_ns += round(1e6 * (1.0 + rng.random()))
        number = select(facts)
        drafted.add(number)
        return number

    policy.select = select_and_note  # type: ignore[method-assign]
    requests = random_requests(rng, 150, 64)
    done = run(engine, requests, arrivals=rng)
    for request in requests:
        eos = not request.params.ignore_eos
        expected = expected_tokens(request.prompt_token_ids, request.params.max_tokens, 64, eos, 1)
        assert done[request.row_id].token_ids == expected
    assert {None, 0} <= drafted
    assert sum(engine.stats.accepted_by_place) > 0
    engine.pool.check()


def test_short_rows_in_reused_slots_are_told_to_the_policy() -> None:
    engine = hash_engine(60, 4, memory=2, max_num_seqs=3)
    policy = MeasuredDrafts([None], K)
    engine.draft_as(Drafting([NgramProposer(engine.table, K)], policy, engine.scheduler))
    told: list[int] = []
    admitted = policy.admitted
    policy.admitted = lambda slot: (told.append(slot), admitted(slot))[1]  # type: ignore[method-assign]
    requests = [Request(row, [row, 5], SamplingParams(max_tokens=3, ignore_eos=True)) for row in range(20)]
    run(engine, requests)
    assert len(told) == 20
    assert set(told) == {0, 1, 2}
