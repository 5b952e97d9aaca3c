"""Tokens of a job: prompts from a sample, completions from earlier runs."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.estimate.lengths import PromptSample, _shared, growth_by_steps, output_lengths
from pipeline.job.preview.prompt_preview import sampled
from pipeline.report.record.row_stats import StepStats
from tests.estimate.conftest import remembered


def request(length: int, max_tokens: int = 100, first: int = 0) -> Request:
    return Request(0, [first + i for i in range(length)], SamplingParams(max_tokens=max_tokens))


def test_completions_are_as_long_as_those_of_earlier_runs_with_prompts_of_that_length():
    history = [remembered(outputs={64: [10] * 50, 128: [30] * 50}), remembered(outputs={64: [1000]}, same_work=False)]
    found = output_lengths([request(10), request(100), request(100), request(60)], history)
    assert found.each.expected == pytest.approx(20, rel=1 / 32)
    assert [round(n / 10) for n in found.drawn] == [1, 3, 3, 1]
    assert found.each.low < found.each.expected < found.each.high
    assert found.come_from == "100 rows of 1 earlier run of this job"


def test_an_unknown_length_uses_all_runs_and_max_tokens_bounds_it():
    found = output_lengths([request(5000, max_tokens=12)], [remembered(outputs={64: [10] * 50, 128: [30] * 50})])
    assert 10 <= found.each.expected <= 12
    assert max(found.drawn) <= 12


def test_more_rows_make_the_interval_narrower_but_never_a_point():
    widths = []
    for count in (20, 2000):
        each = output_lengths([request(10)], [remembered(outputs={64: [10, 40] * count})]).each
        widths.append((each.high - each.low) / each.expected)
    assert widths[0] > widths[1] >= 2 * 0.03


def test_without_runs_the_assumption_is_named():
    found = output_lengths([request(10, max_tokens=80), request(10, max_tokens=40)], [])
    assert (found.each.low, found.each.expected, found.each.high) == (6, 30, 60)
    assert found.come_from == "an assumption: half of max_tokens, 60 on average"


def test_a_row_generates_one_token_at_least():
    each = output_lengths([request(10, max_tokens=1), request(10, max_tokens=3)], []).each
    assert (each.low, each.expected, each.high) == (1, 1, 2)


def test_with_steps_a_row_counts_as_one_request_with_the_tokens_of_all():
    """Histograms and buckets are of whole rows, whose prompts are four times as long as the first."""
    steps = {"": StepStats(50, 50, 500, 0, 100), "check": StepStats(50, 90, 1500, 900, 0)}
    earlier = remembered(outputs={64: [10] * 50, 512: [300] * 50})
    earlier = replace(earlier, run=replace(earlier.run, row_stats=replace(earlier.run.row_stats, steps=steps)))
    assert growth_by_steps([earlier]) == 4
    assert growth_by_steps([remembered(), replace(earlier, same_work=False)]) is None
    found = output_lengths([request(10), request(100)], [earlier], growth=4, step_tokens=500)
    assert [round(n / 10) for n in found.drawn] == [1, 30]


def test_a_row_of_n_samples_generates_n_times_a_sample():
    requests = [Request(0, [1] * 10, SamplingParams(max_tokens=80, temperature=1.0, n=n)) for n in (1, 3)]
    assumed = output_lengths(requests, [])
    assert assumed.each.expected == 80
    assert assumed.drawn == (40, 40)
    assert assumed.come_from.endswith("80 on average, of each of 2 samples of a row")
    known = output_lengths(requests, [remembered(outputs={64: [10] * 40})])
    assert known.each.expected == pytest.approx(20)
    assert known.drawn == (10, 10)
    assert known.come_from == "40 samples of 1 earlier run of this job"


def test_prompt_tokens_of_all_rows_are_exact_and_of_a_sample_an_interval():
    requests = tuple(request(n) for n in (10, 20, 30, 40))
    whole = PromptSample(requests, 4, 0, 4, 0.0, (15.0, 35.0)).tokens_each
    assert (whole.low, whole.expected, whole.high) == (25, 25, 25)
    some = PromptSample(requests, 4, 0, 4000, 0.0, (15.0, 35.0)).tokens_each
    assert some.low < some.expected == 25 < some.high


def test_the_interval_of_a_sample_has_about_its_nominal_coverage():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        means = rng.normal(100, 10, 30)
        sample = PromptSample((request(round(means.mean())),), 1920, 0, 10**6, 0.0, tuple(means.tolist()))
        error = (sample.tokens_each.high - sample.tokens_each.low) / 2
        held += abs(means.mean() - 100) <= error
    assert held / 400 == pytest.approx(0.95, abs=0.03)


def test_prefixes_are_found_in_whole_blocks_and_never_a_whole_prompt():
    same = [request(40), request(40), request(40)]
    assert _shared(same, 16) == pytest.approx(2 * 32 / 120)
    assert _shared([request(16), request(16)], 16) == 0  # a last token is always computed
    assert _shared([request(40), request(40, first=1)], 16) == 0
    read = [replace(each, params=replace(each.params, prompt_logprobs=0)) for each in same]
    assert _shared(read, 16) == 0, "prompts that are read are computed whole"


@pytest.mark.parametrize(("total", "rows"), [(0, 10), (1, 10), (100, 100), (1000, 128), (10**6, 2000), (130, 100)])
def test_a_sample_is_spread_over_the_input_and_no_row_is_read_twice(total, rows):
    windows = sampled(total, rows)
    seen = [row for window in windows for row in range(window.start, window.stop)]
    assert len(seen) == len(set(seen))
    assert all(0 <= row < total for row in seen)
    assert len(seen) == total if rows >= total else rows <= len(seen) + 64
    if windows and total > 10 * rows:
        assert seen[-1] > total * 0.9
