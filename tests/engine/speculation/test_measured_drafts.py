"""The measuring policy: it drafts where drafts pay, stops where they do not, and bounds the cost of its trials."""

import numpy as np
import pytest

from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import AcceptanceCounts, StepFacts
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts
from pipeline.engine.speculation.row_lengths import RowLengths
from tests.engine.drafts.proposers import draft_with
from tests.engine.drafts.test_draft_model import draft_with_itself
from tests.engine.hash_runner import check_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run
from tests.engine.speculation.jobs import MAX_DRAFTS, Job, Machine, speed

MEMORY_BOUND = Machine()  # a step of eight sequences with all drafts takes 1.1 times a plain one
COMPUTE_BOUND = Machine(step_s=0.5e-3, token_s=1e-3)
SHORT_STEPS = Machine(step_s=230e-6, token_s=22e-6)  # of a tiny model on a CPU
SLOW_DRAFTS = Machine(step_s=0.008, drafting_s=0.02)  # a slow draft model
WITH_PROMPTS = Machine(prompt_s=50e-6)


def high(step: int, num: int) -> float:
    return 0.85


def low(step: int, num: int) -> float:
    return 0.05


def after_300_steps(step: int, num: int) -> float:
    return 0.05 if step < 300 else 0.85


def until_300_steps(step: int, num: int) -> float:
    return 0.85 if step < 300 else 0.0


def half_of_the_rows(step: int, num: int) -> np.ndarray:
    return np.where(np.arange(num) % 2 == 0, 0.9, 0.1)


def test_little_is_lost_where_drafts_do_not_pay_and_nearly_all_is_gained_where_they_do() -> None:
    for machine, chance, num, num_prompt in (
        (COMPUTE_BOUND, high, 16, 0),
        (COMPUTE_BOUND, low, 4, 0),
        (SHORT_STEPS, low, 64, 0),
        (SLOW_DRAFTS, low, 4, 0),
        (MEMORY_BOUND, low, 8, 0),
        (WITH_PROMPTS, low, 8, 300),
    ):
        plain, auto = (speed(machine, chance, policy, num=num, num_prompt=num_prompt) for policy in (None, "auto"))
        assert auto > 0.98 * plain, (machine, num)
    for machine, num, num_prompt in (
        (MEMORY_BOUND, 1, 0),
        (MEMORY_BOUND, 8, 0),
        (SHORT_STEPS, 1, 0),
        (WITH_PROMPTS, 8, 300),
    ):
        options = {"num": num, "num_prompt": num_prompt, "num_tokens": 5000}
        plain, auto, forced = (speed(machine, high, policy, **options) for policy in (None, "auto", "forced"))
        assert forced > 1.5 * plain, (machine, num)
        assert auto > 0.95 * forced, (machine, num)


def test_each_row_drafts_as_its_own_drafts_are_accepted() -> None:
    """The policy is faster than the same number of drafts for all, if drafts have a cost."""
    machine = Machine(step_s=0.004, token_s=250e-6)
    forced, auto = (speed(machine, half_of_the_rows, policy, num=16, num_tokens=4000) for policy in ("forced", "auto"))
    assert auto > 1.1 * forced


def test_drafts_begin_and_end_as_the_text_changes() -> None:
    job = Job(MEMORY_BOUND, after_300_steps)
    assert job.share(300) < 0.15
    job.share(500)
    assert job.share(200) > 0.95
    job = Job(Machine(drafting_s=0.004), until_300_steps)
    job.share(100)
    assert job.share(200) > 0.95
    job.share(150)
    assert job.share(300) < 0.15


def test_drafts_that_stop_to_pay_are_noticed_soon() -> None:
    job = Job(Machine(noise=0.0), high)
    job.share(200)
    assert job.share(20) == 1.0
    job.machine = Machine(drafting_s=0.06, noise=0.0)  # a step takes eight times as long, for four times the tokens
    assert job.share(12) < 1.0
    job.share(100)
    assert job.share(100) < 0.1


@pytest.mark.parametrize("machine", [COMPUTE_BOUND, SLOW_DRAFTS, SHORT_STEPS])
def test_the_account_bounds_what_drafts_lose(machine: Machine) -> None:
    """The loss is a few plain steps and a small share of all time, however long the job is."""
    job = Job(machine, low, num=16)
    plain_s = machine.seconds(16, 0, False)
    for _ in range(4):
        job.share(1500)
        lost_s = job.true_s - job.tokens * plain_s
        assert lost_s < 16 * plain_s + 0.01 * job.true_s
    assert 0 < job.drafted < 0.05 * job.steps, "it was tried"


def test_a_full_step_is_plain_and_no_measurement() -> None:
    job = Job(MEMORY_BOUND, high)
    job.share(150)
    assert job.share(20) == 1.0
    assert not any(job.step(room=0, num_prompt=2000, stall_s=1.0) for _ in range(50))
    assert job.share(30) > 0.9


def test_a_stall_is_no_reason_to_stop() -> None:
    job = Job(MEMORY_BOUND, high)
    job.share(150)
    for number in range(40):
        assert job.step(stall_s=0.2 if number % 20 == 10 else 0.0)


def test_a_batch_of_another_size_drafts_like_the_last() -> None:
    job = Job(MEMORY_BOUND, high)
    job.share(150)
    assert [job.share(20, num=num) for num in (2, 1, 7)] == [1.0] * 3


@pytest.mark.parametrize("in_flight", [1, 2])
def test_late_outcomes_are_counted_for_their_own_step(in_flight: int) -> None:
    job = Job(MEMORY_BOUND, lambda step, num: 1.0, in_flight=in_flight)
    job.share(400)
    counts = job.counts
    assert job.drafted > 200
    assert abs(counts.drafted_steps[3] - job.drafted) <= in_flight
    assert counts.accepted_tokens[3] == counts.draft_tokens[3] > 0


def test_a_step_that_was_undone_is_ignored() -> None:
    job = Job(MEMORY_BOUND, high)
    for number in range(150):
        if number % 3 == 0:
            assert job.policy is not None
            job.policy.select(StepFacts(8, 0, 1000))
        job.step()
    assert job.share(20) > 0.9


def test_time_of_other_work_is_excluded_from_steps() -> None:
    """Another model's work is reported as a pause."""
    plain, paused = Job(MEMORY_BOUND, high), Job(MEMORY_BOUND, high)
    assert paused.policy is not None
    paused.policy.paused(5)  # before the first step
    for number in range(400):
        plain.step()
        if number % 3 == 0:
            paused.now_s += 0.06
            paused.policy.paused(60_000_000)
        paused.step()
    (line,), (expected,) = paused.counts.lines(), plain.counts.lines()
    assert line.drafted_steps > 300
    assert line.saved_s == pytest.approx(expected.saved_s, rel=0.1)


def test_what_was_saved_is_counted() -> None:
    machine = Machine(noise=0.0)
    job = Job(machine, lambda step, num: 1.0)
    job.share(400)
    (line,) = job.counts.lines()
    assert line.batch == "8-15"
    assert line.drafted_steps + line.plain_steps == 399, "the beginning of the first one is unknown"
    assert line.on_steps > 300 > line.probe_steps > 0
    with_drafts_s, plain_s = machine.seconds(8 * (1 + MAX_DRAFTS), 0, True), machine.seconds(8, 0, False)
    expected_s = (line.drafted_steps - line.probe_steps) * (plain_s * (1 + MAX_DRAFTS) - with_drafts_s)
    assert line.saved_s == pytest.approx(expected_s, rel=0.1)


def test_savings_are_not_overestimated_if_the_machine_becomes_faster_as_drafts_begin() -> None:
    """Plain steps were timed while the machine was slow. A step with drafts computes more than a plain one, so a plain
    step would have taken no longer at that moment."""
    fast = Machine(noise=0.0)
    job = Job(Machine(step_s=0.4, noise=0.0), lambda step, num: 1.0)
    while not job.step():
        pass
    job.machine = fast
    before = job.drafted
    job.share(250)
    (line,) = job.counts.lines()
    true_s = (job.drafted - before) * (
        fast.seconds(8, 0, False) * (1 + MAX_DRAFTS) - fast.seconds(8 * (1 + MAX_DRAFTS), 0, True)
    )
    assert line.saved_s < 1.3 * true_s


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["lookup", "draft model"])
def test_an_engine_gives_the_tokens_of_plain_steps(kind: str, is_asynchronous: bool) -> None:
    engine = hash_engine(120, 4, memory=1, is_asynchronous=is_asynchronous, max_num_batched_tokens=100)
    proposer = NgramProposer(engine.table, 4) if kind == "lookup" else draft_with_itself(engine, 4, memory=1)
    rng, now_ns = np.random.default_rng(1), 0
    policy = MeasuredDrafts(4, clock=lambda: now_ns)
    draft_with(engine, proposer, policy)
    select = policy.select
    chosen: set[bool] = set()

    def select_and_note(facts: StepFacts) -> bool:
        nonlocal now_ns
        now_ns += round(1e6 * (1.0 + 0.1 * rng.random()))
        chosen.add(has_drafts := select(facts))
        return has_drafts

    policy.select = select_and_note  # type: ignore[method-assign]
    requests = random_requests(rng, 150, 64)
    check_tokens(run(engine, requests, arrivals=rng), requests, memory=1)
    assert chosen == {False, True}
    assert sum(engine.stats.accepted_by_position) > 0
    engine.pool.check()


def test_short_rows_in_reused_slots_begin_without_a_history() -> None:
    engine, policy, slots = hash_engine(60, 4, memory=2, max_num_seqs=3), MeasuredDrafts(4), list[int]()
    draft_with(engine, NgramProposer(engine.table, 4), policy)
    admitted = policy.admitted
    policy.admitted = lambda slot: (slots.append(slot), admitted(slot))[1]  # type: ignore[method-assign]
    run(engine, [Request(row, [row, 5], SamplingParams(max_tokens=3, ignore_eos=True)) for row in range(20)])
    assert len(slots) == 20
    assert set(slots) == {0, 1, 2}


def test_the_wait_for_requests_is_excluded_from_the_next_step() -> None:
    engine = hash_engine(60, 4, memory=2)
    slept_ns = 0
    policy = MeasuredDrafts(4, clock=lambda: slept_ns + 1_000_000 * engine.stats.num_steps)
    draft_with(engine, NgramProposer(engine.table, 4), policy)
    for row in range(80):
        slept_ns += 10**12
        run(engine, [Request(row, [row, 5], SamplingParams(max_tokens=12, ignore_eos=True))])
    assert policy._unsettled_s < 1.0
    assert abs(policy._account.balance_s) < 1.0


# -- lengths of a sequence's drafts, by the acceptance of its last ones


def lengths_after(rows: RowLengths, accepted: list[int], cost: float, slot: int = 3) -> list[int]:
    """Return the lengths of a sequence's drafts; up to `accepted` of them are accepted in each step."""
    slot_S, seen = np.array([slot]), []
    for each in accepted:
        (length,) = rows.lengths(slot_S).tolist()
        seen.append(length)
        if length:
            rows.observe(AcceptanceCounts(slot_S, np.array([length]), np.array([min(each, length)])), cost)
    return seen


def test_a_row_drafts_as_much_as_pays() -> None:
    rows = RowLengths(8)
    rows.admitted(3)
    assert lengths_after(rows, [8] * 20, cost=0.5)[-1] == 8
    falling = lengths_after(rows, [0] * 20, cost=0.5)
    assert falling[:9] == sorted(falling[:9], reverse=True), "ever less"
    assert falling[-1] == 0
    assert 0 < sum(length > 0 for length in lengths_after(rows, [0] * 60, cost=0.5)) < 12, "it tries now and then"
    assert lengths_after(rows, [8] * 40, cost=0.5)[-1] == 8, "and resumes"


def test_a_new_row_drafts_like_the_others_whatever_its_slot_held() -> None:
    rows = RowLengths(8)
    rows.admitted(3)
    lengths_after(rows, [0] * 60, cost=0.3)
    rows.admitted(5)
    assert rows.lengths(np.array([5])).tolist() == [1], "the acceptance of this text's drafts is known"
    rows = RowLengths(8)
    for slot in (3, 4):
        rows.admitted(slot)
    for _ in range(20):
        lengths_after(rows, [8], cost=0.3, slot=4)
        lengths_after(rows, [0], cost=0.3, slot=3)
    before = rows.lengths(np.array([3, 4])).tolist()
    rows.admitted(3)
    assert before[0] < rows.lengths(np.array([3])).tolist()[0]
