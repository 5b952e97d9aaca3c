"""The cost table against formulas it has to find again, through noise, outliers and a machine that changes."""

import itertools

import numpy as np
import pytest

from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.grid import token_grid
from pipeline.engine.speculation.robust import MovingMedian

CONTEXTS = (64, 1024)


class Clock:
    """A clock that steps move on by a formula; counts them."""

    def __init__(self, step_s) -> None:
        self.now, self.step_s, self.ran = 0.0, step_s, []

    def run_step(self, tokens: int, sequences: int, context: int) -> None:
        self.ran.append((tokens, sequences, context))
        self.now += self.step_s(tokens, sequences, sequences * context)

    def __call__(self) -> float:
        return self.now


def linear_s(tokens: float, sequences: float, kv: float) -> float:
    return 1e-3 + 20e-6 * tokens + 30e-6 * sequences + 10e-9 * kv


def measured(step_s, max_tokens: int = 512, **options) -> StepCost:
    clock = Clock(step_s)
    return StepCost.measure(clock.run_step, max_tokens, CONTEXTS, clock=clock, **({"budget_s": 1e9} | options))


def flat(seconds: float = 0.01) -> StepCost:
    return StepCost([1, 64, 512], [[[seconds] * 3] * 2] * 3, CONTEXTS)


def test_median_ignores_wild_values_and_follows_a_change() -> None:
    median = MovingMedian(5)
    assert [median.add(v) for v in (1.0, 1.0, 1.0, 90.0, -90.0)] == [1.0] * 5
    assert [median.add(2.0) for _ in range(4)] == [1.0, 2.0, 2.0, 2.0]
    assert MovingMedian(4).value == 0.0
    median = MovingMedian(4)
    assert [median.add(v) for v in (1.0, 2.0, 4.0, 8.0)] == [1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize(("sequences", "drafts", "context"), [(1, 0, 64), (64, 0, 1024), (37, 0, 500), (100, 300, 64)])
def test_a_linear_cost_is_found_again_between_the_points(sequences: int, drafts: int, context: int) -> None:
    table = measured(linear_s)
    kv = sequences * context
    truth_s = linear_s(sequences + drafts, sequences, kv)
    assert table.step_s(sequences, kv, 0, drafts) == pytest.approx(truth_s, rel=0.02)


def test_the_share_of_sequences_decides_between_plain_and_drafted() -> None:
    """128 tokens of 128, 64 and 32 sequences: what a sequence costs counts for each."""
    table = measured(linear_s)
    times = [table.step_s(n, n * 64, 0, 128 - n) for n in (128, 64, 32)]
    assert times == pytest.approx([linear_s(128, n, n * 64) for n in (128, 64, 32)], rel=0.02)


@pytest.mark.parametrize("drafts", [3, 5, 8, 16])
def test_more_drafts_a_sequence_than_were_timed_read_no_more_of_its_context(drafts: int) -> None:
    def step_s(tokens: int, sequences: int, kv: int) -> float:
        return 1e-3 + 20e-6 * tokens + 100e-9 * kv

    table, kv = measured(step_s), 16 * 1000
    assert table.step_s(16, kv, 0, 16 * drafts) == pytest.approx(step_s(16 * (1 + drafts), 16, kv), rel=0.02)
    assert table.curve_s(16, kv, 0, 16 * drafts)[-1] == pytest.approx(table.step_s(16, kv, 0, 16 * drafts))


def test_two_tokens_a_sequence_may_cost_as_much_as_many() -> None:
    """Attention over one query a sequence is one thing, over some another, however many."""

    def step_s(tokens: int, sequences: int, kv: int) -> float:
        return 1e-3 + 10e-6 * tokens + 100e-9 * kv * (3 if tokens > sequences else 1)

    table, kv = measured(step_s), 32 * 500
    for drafts in (0, 1, 3, 7):
        truth_s = step_s(32 * (1 + drafts), 32, kv)
        assert table.step_s(32, kv, 0, 32 * drafts) == pytest.approx(truth_s, rel=0.02)
        assert table.curve_s(32, kv, 0, 32 * 7)[32 * drafts] == pytest.approx(truth_s, rel=0.02)


def test_where_few_drafts_take_less_than_many_still_more_take_no_more_for_it() -> None:
    """Plain steps are graphs, and few tokens a sequence go another way than many."""

    def step_s(tokens: int, sequences: int, kv: int) -> float:
        return 1e-3 * (5 if tokens == sequences else 8 if tokens < 4 * sequences else 10)

    table = measured(step_s)
    for drafts in (7, 16):
        assert table.step_s(16, 16 * 64, 0, 16 * drafts) == pytest.approx(10e-3)
        assert table.curve_s(16, 16 * 64, 0, 16 * drafts)[-1] == pytest.approx(10e-3)


def test_where_tokens_begin_to_cost_something_is_found() -> None:
    def step_s(tokens: int, sequences: int, kv: int) -> float:
        return max(8e-3, 35e-6 * tokens)

    table = measured(step_s, max_tokens=1024)
    for drafts in (64, 128, 150, 180, 300):
        assert table.step_s(48, 48 * 64, 0, drafts) == pytest.approx(step_s(48 + drafts, 48, 0), rel=0.03)


def test_beyond_the_grid_a_token_costs_what_the_last_ones_cost() -> None:
    table = measured(linear_s, max_tokens=128)
    assert table.step_s(100, 6400, num_other=1900) == pytest.approx(linear_s(2000, 100, 6400), rel=0.05)


def test_padded_steps_cost_what_their_padded_size_costs() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)

    def stairs_s(tokens: int, sequences: int, kv: int) -> float:
        return 1e-3 * min([size for size in sizes if size >= tokens], default=tokens)

    table = measured(stairs_s, max_tokens=64, padded_to=sizes)
    assert table.curve_s(1, 64, 0, 31) == pytest.approx([stairs_s(1 + d, 1, 64) for d in range(32)], rel=1e-6)


def test_the_smallest_steps_are_timed_whatever_the_budget_and_the_others_while_it_lasts() -> None:
    clock = Clock(linear_s)
    cost = StepCost.measure(clock.run_step, 512, CONTEXTS, budget_s=0.0, clock=clock)
    assert {tokens for tokens, _, _ in clock.ran} == {1, 2}
    assert cost.step_s(16, 16 * 64) == pytest.approx(linear_s(16, 16, 16 * 64), rel=0.05)
    generous = Clock(linear_s)
    StepCost.measure(generous.run_step, 512, CONTEXTS, budget_s=1e9, clock=generous)
    assert {tokens for tokens, _, _ in generous.ran} == set(token_grid(512))
    assert all(tokens >= sequences for tokens, sequences, _ in generous.ran)


@pytest.mark.parametrize("step_s", [0.01, 0.05, 0.2, 0.4, 1.0, 30.0])
def test_timing_ends_with_its_budget_however_slow_steps_are(step_s: float) -> None:
    """But for the step in which it ends, and one of each of the two smallest sizes."""

    def slow_s(tokens: int, sequences: int, kv: int) -> float:
        return step_s * (1.0 + 0.1 * tokens)

    clock, budget_s = Clock(slow_s), 1.5
    table = StepCost.measure(clock.run_step, 64, CONTEXTS, budget_s=budget_s, clock=clock)
    longest_s = max(slow_s(tokens, 0, 0) for tokens, *_ in clock.ran)
    assert clock.now <= budget_s + longest_s + slow_s(2, 0, 0)
    assert table.step_s(4, 4 * 64, 0, 4) == pytest.approx(slow_s(8, 0, 0), rel=0.02)


@pytest.mark.parametrize("first", [0, 13, 60])
def test_a_disturbance_at_start_up_does_not_have_all_repeats_of_a_point(first: int) -> None:
    calls = itertools.count()

    def disturbed_s(tokens: int, sequences: int, kv: int) -> float:
        return linear_s(tokens, sequences, kv) * (7.0 if first <= next(calls) < first + 40 else 1.0)

    table = measured(disturbed_s)
    for tokens in (1, 2, 8, 16, 64):
        assert table.step_s(tokens, tokens * 64) == pytest.approx(linear_s(tokens, tokens, tokens * 64), rel=0.05)


def test_wild_steps_change_nothing() -> None:
    table = flat()
    for step in range(60):
        table.observe(8, 512, 8 * (step % 2), 0.01 if step % 3 else 0.1)
    assert table.step_s(8, 512) == pytest.approx(0.01, rel=0.02)
    assert table.step_s(8, 512, 0, 8) == pytest.approx(0.01, rel=0.02)


def test_a_slower_machine_is_slower_for_all_steps_soon() -> None:
    """Only drafted steps are seen; plain ones must follow, or drafting would look worse than it is."""
    table = flat()
    for _ in range(20):
        table.observe(8, 512, 8, 0.01)
    before = table.step_s(8, 512, 0, 8) / table.step_s(8, 512)
    for _ in range(10):
        table.observe(8, 512, 8, 0.02)
    assert table.step_s(8, 512, 0, 8) == pytest.approx(0.02, rel=0.05)
    assert table.step_s(8, 512, 0, 8) / table.step_s(8, 512) == pytest.approx(before, rel=0.1)


def test_a_point_measured_wrongly_is_put_right_for_its_kind_only() -> None:
    table = flat()
    version = table.version
    for step in range(60):
        drafts = 8 if step % 4 == 0 else 0
        table.observe(8, 512, drafts, 0.015 if drafts else 0.01)
    assert table.version > version
    assert table.step_s(8, 512) == pytest.approx(0.01, rel=0.03)
    assert table.step_s(8, 512, 0, 8) == pytest.approx(0.015, rel=0.1)


def test_elasticity_is_one_where_compute_is_the_limit_and_zero_where_it_is_not() -> None:
    assert flat().elasticity(8, 512, 0, 8) == pytest.approx(0.0, abs=1e-9)
    compute = measured(lambda tokens, sequences, kv: 1e-3 * tokens)
    assert compute.elasticity(8, 512, 100, 8) == pytest.approx(1.0, rel=1e-3)


def test_a_curve_is_the_steps_one_by_one() -> None:
    table = measured(linear_s)
    table.observe(16, 1024, 16, 0.5)
    curve_s = table.curve_s(16, 1024, 0, 40) * table.speed
    assert curve_s == pytest.approx([table.step_s(16, 1024, 0, drafts) for drafts in range(41)])
    assert (np.diff(curve_s[1:]) > 0).all()


def test_a_wild_first_step_is_not_taken_for_the_machines_speed() -> None:
    cost = measured(linear_s)
    cost.observe(4, 4 * 64, 0, 8.0 * linear_s(4, 4, 4 * 64))
    assert cost.speed == pytest.approx(1.0)
    for _ in range(8):
        cost.observe(4, 4 * 64, 12, linear_s(16, 4, 4 * 64))
    assert cost.step_s(4, 4 * 64) == pytest.approx(linear_s(4, 4, 4 * 64), rel=0.1)


def test_steps_are_timed_behind_others_of_their_kind() -> None:
    """The first one of a kind and size takes half as long again: what it needs was thrown out of the caches."""
    before = (0, 0, 0)

    def cold_s(tokens: int, sequences: int, kv: int) -> float:
        nonlocal before
        is_cold, before = before != (tokens, sequences, kv), (tokens, sequences, kv)
        return linear_s(tokens, sequences, kv) * (1.5 if is_cold else 1.0)

    table = measured(cold_s)
    for sequences, drafts in ((1, 0), (8, 0), (16, 48)):
        truth_s = linear_s(sequences + drafts, sequences, sequences * 64)
        assert table.step_s(sequences, sequences * 64, 0, drafts) == pytest.approx(truth_s, rel=0.02)


def test_one_change_from_plain_to_drafted_steps_tells_what_they_deviate_by() -> None:
    """Both take longer than the table says, drafted ones by much more; the speed is that of the plain ones before."""
    table = flat()
    for _ in range(10):
        table.observe(1, 64, 0, 0.015)
    for _ in range(30):
        table.observe(1, 64, 6, 0.030)
    assert table.step_s(1, 64, 0, 6) == pytest.approx(0.030, rel=0.02)
    assert table.step_s(1, 64) == pytest.approx(0.015, rel=0.25)


def test_two_wild_ones_of_the_first_drafted_steps_change_little() -> None:
    """Who never drafts again sees nothing that would put it right."""
    table = flat()
    for _ in range(6):
        table.observe(1, 64, 0, 0.010)
    before_s = table.step_s(1, 64, 0, 6)
    for factor in (10.0, 1.0, 4.0):
        table.observe(1, 64, 6, factor * before_s)
    assert table.step_s(1, 64, 0, 6) < 1.1 * before_s
