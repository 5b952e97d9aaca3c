"""Speed of this machine, from the records of runs."""

from dataclasses import replace

import pytest

from pipeline.estimate.measured import measured_speed
from pipeline.job.planning.history import Remembered
from pipeline.report.record.quality_stats import QualityStats
from pipeline.report.record.row_stats import LengthBucket, RowStats
from tests.estimate.conftest import remembered


def plain_steps(counts_and_rows, a_step_us=100, a_row_us=7):
    """Return the engine's sums over plain steps of exactly this duration."""
    steps = [(rows, a_step_us + a_row_us * rows) for count, rows in counts_and_rows for _ in range(count)]
    return {
        "plain_steps": len(steps),
        "plain_rows": sum(rows for rows, _ in steps),
        "plain_rows_squared": sum(rows**2 for rows, _ in steps),
        "plain_us": sum(us for _, us in steps),
        "plain_rows_us": sum(rows * us for rows, us in steps),
    }


def test_the_time_of_a_token_is_the_measured_one():
    speed = measured_speed([remembered(prompt=1000, cached_tokens=200, generated=500, wall_us=8500)], rows=10**6)
    assert (speed.startup_us, speed.load_us, speed.driver_us) == (300, 700, 500)
    assert speed.prompt_token_us == pytest.approx(2000 / 800)
    assert speed.generated_token_us == pytest.approx(10)
    assert speed.compute_us(800, 500) == pytest.approx(7000)


def test_a_run_with_half_a_batch_predicts_a_full_one():
    sums = plain_steps([(10, 8), (10, 32)])
    speed = measured_speed([remembered(decode_us=10**5, **sums)], rows=10**6)
    assert speed.generated_token_us == pytest.approx(100 / 64 + 7)
    few = measured_speed([remembered(decode_us=10**5, **sums)], rows=40)
    assert few.generated_token_us == pytest.approx(100 / 40 + 7)  # the job has no more rows


@pytest.mark.parametrize("sums", [plain_steps([(10, 64)]), plain_steps([(10, 60), (10, 62)]), {}])
def test_a_full_batch_is_used_as_measured(sums):
    assert measured_speed([remembered(**sums)], rows=10**6).generated_token_us == pytest.approx(10)


def test_a_whole_run_overrides_a_probe_and_several_runs_give_the_spread():
    probe = remembered(prompt=10, generated=5, prefill_us=10**6, decode_us=10**6)
    assert measured_speed([probe, remembered()], 10**6).prompt_token_us == pytest.approx(2)
    once = measured_speed([remembered()], 10**6)
    assert (once.fastest, once.slowest) == (pytest.approx(1 / 1.1), 1.1)
    assert "as long" not in once.comes_from


def test_low_and_high_are_the_fastest_and_the_slowest_run():
    """The text says so if they are far apart; neither bound is slower than the slowest run."""
    slower = remembered(prefill_us=4000, decode_us=10_000)
    speed = measured_speed([slower, remembered()], 10**6)
    assert (speed.fastest, speed.slowest) == (pytest.approx(2 / 3), pytest.approx(4 / 3))
    assert speed.comes_from.startswith("2 earlier runs, the slowest took 2.0 times as long as the fastest")
    far = measured_speed([remembered(prefill_us=20_000, decode_us=50_000), remembered()], 10**6)
    assert far.slowest * far.generated_token_us == pytest.approx(100)
    assert far.fastest * far.generated_token_us == pytest.approx(10)


def test_runs_of_another_mixture_of_prompts_and_answers_are_not_slower():
    prompts = remembered(prompt=6_000, generated=20, prefill_us=12_000, decode_us=200)
    answers = remembered(prompt=2_000, generated=3_800, prefill_us=4_000, decode_us=38_000)
    speed = measured_speed([prompts, answers], 10**6)
    assert (speed.fastest, speed.slowest) == (pytest.approx(1 / 1.1), 1.1)


def test_compared_rows_take_the_measured_time_or_that_of_two_rows():
    def watched(quality_us):
        before = remembered().run
        actor = replace(before.actors[0], phases_us=before.actors[0].phases_us | {"quality": quality_us})
        stats = RowStats(lengths={64: LengthBucket(rows=50)}, quality=QualityStats(rows=4))
        return Remembered(replace(before, actors=[actor], row_stats=stats), same_work=True)

    plain, new = measured_speed([remembered()], 10**6), measured_speed([remembered()], 10**6, compared=0.01)
    assert new.compute_us(800, 500) == pytest.approx(1.02 * plain.compute_us(800, 500))
    found = measured_speed([watched(1680)], 10**6, compared=0.05)  # 420 us a row, where 7,000 computed 50
    assert found.overhead["quality"] == pytest.approx(0.05 * 3)
    assert measured_speed([watched(1680)], 10**6).overhead["quality"] == 0  # this job compares none


def test_nothing_is_known_without_a_run_that_generated():
    assert measured_speed([], 10) is None
    assert measured_speed([remembered(generated=0)], 10) is None
