"""Estimate a job's prompt lengths from a sample, and its output lengths from earlier runs or an assumption.

Intervals are 95% confidence intervals: two standard errors of the mean, over the stretches read for prompts (adjacent
rows resemble each other), over the rows of earlier runs for outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from pipeline.data.source import InputWindow
from pipeline.data.units import MAX_BUDGET, window_units
from pipeline.engine.request import Request
from pipeline.job.actor.tokenize import Tokenize
from pipeline.job.planning.history import Remembered
from pipeline.job.planning.plan import JobPlan
from pipeline.job.preview.prompt_preview import sampled
from pipeline.report.estimate import Interval
from pipeline.report.record.row_stats import Histogram, RowStats, StepStats, length_bucket

MIN_ERROR = 0.03  # smallest relative error of a mean
ASSUMED = Interval(0.1, 0.5, 1.0)  # share of max_tokens, without earlier runs


@dataclass(frozen=True)
class PromptSample:
    """Prompts of a sample of `rows` rows, of which `errors` have no usable prompt and `dropped` do not meet input.when.
    shared: share of the prompt tokens
    in blocks that begin an earlier prompt of the sample. means: mean prompt tokens of each stretch. repeated: prompt
    tokens after the last full block, which each further sample of a row recomputes. reserved: tokens by which units are
    cut, including those that requests may generate."""

    requests: tuple[Request, ...]
    rows: int
    errors: int
    total_rows: int
    shared: float
    means: tuple[float, ...]
    repeated: int = 0
    reserved: int = 0
    dropped: int = 0
    growth: float = 1.0  # of a row's prompt tokens by steps

    @property
    def samples_each(self) -> float:
        """Mean number of samples per row."""
        return fmean(request.params.n for request in self.requests) if self.requests else 1.0

    @property
    def tokens_each(self) -> Interval:
        """Mean number of prompt tokens per row, over all its requests, without failed rows."""
        lengths = [len(request.prompt_token_ids) for request in self.requests]
        mean = fmean(lengths) if lengths else 0.0
        if self.rows >= self.total_rows or len(self.means) < 2:
            return Interval(mean, mean, mean).times(self.growth)
        error = 2 * stdev(self.means) / sqrt(len(self.means)) * sqrt(1 - self.rows / self.total_rows)
        return Interval(max(0.0, mean - error), mean, mean + error).times(self.growth)


def sample_prompts(plan: JobPlan, tokenize: Tokenize, rows: int, block_size: int, context: int) -> PromptSample:
    """Read about `rows` rows, evenly spread over the input, and tokenize them. context: tokens that a prompt and its
    completion may have together. Longer prompts are errors; requests generate at most what the prompt leaves."""
    requests: list[Request] = []
    means: list[float] = []
    errors = dropped = reserved = 0
    for window in sampled(plan.num_rows, rows):
        of_units = list(_requests(plan, window, tokenize))
        every = [request for requests, _, _ in of_units for request in requests]
        fitting = [r for r in every if len(r.prompt_token_ids) <= context - (r.task is None)]
        found = [_capped(request, context) for request in fitting]
        errors += sum(failed for _, failed, _ in of_units) + len(every) - len(found)
        dropped += sum(uncomputed for _, _, uncomputed in of_units)
        reserved += sum(len(r.prompt_token_ids) + min(r.max_tokens * r.params.n, MAX_BUDGET) for r in fitting)
        requests += found
        if found:
            means.append(fmean(len(request.prompt_token_ids) for request in found))
    repeated = sum((r.params.n - 1) * tail(len(r.prompt_token_ids), block_size) for r in requests)
    return PromptSample(
        tuple(requests),
        len(requests) + errors + dropped,
        errors,
        plan.num_rows,
        _shared(requests, block_size),
        tuple(means),
        repeated,
        reserved,
        dropped,
    )


def _capped(request: Request, context: int) -> Request:
    """Return `request` with its max_tokens capped to what the context leaves."""
    room = context - len(request.prompt_token_ids)
    if request.max_tokens <= room:
        return request
    params = replace(request.params, max_tokens=room, min_tokens=min(room, request.params.min_tokens))
    return replace(request, params=params)


def tail(prompt_tokens: int, block_size: int) -> int:
    """Return the number of prompt tokens that a further sample computes when all full blocks are cached, at least 1."""
    return prompt_tokens - max(0, prompt_tokens - 1) // block_size * block_size


def _requests(plan: JobPlan, window: InputWindow, tokenize: Tokenize) -> Iterator[tuple[list[Request], int, int]]:
    """Yield the requests of each unit, and its numbers of failed and of dropped rows."""
    for unit in window_units(plan.source, window, plan.job.prompt_units):
        requests, failed = tokenize(unit)
        yield requests, len(failed), len(unit.dropped())


def _shared(requests: Sequence[Request], block_size: int) -> float:
    """Return the share of prompt tokens in full blocks that begin an earlier prompt. A prompt's last token is always
    computed; prompts with log-probabilities use no cached blocks."""
    seen: set[int] = set()
    cached = total = 0
    for request in requests:
        ids = request.prompt_token_ids
        total += len(ids)
        chain, is_cached = 0, request.params.prompt_logprobs is None
        for start in range(0, (len(ids) - 1) // block_size * block_size, block_size):
            chain = hash((chain, tuple(ids[start : start + block_size])))
            is_cached = is_cached and chain in seen
            cached += block_size * is_cached
            seen.add(chain)
    return cached / total if total else 0.0


@dataclass(frozen=True)
class OutputLengths:
    """Generated tokens. each: mean per row, over all samples of it together. drawn: tokens of one sample, for each
    request of the sample of prompts. come_from: the source, as text."""

    each: Interval
    drawn: tuple[int, ...]
    come_from: str


def growth_by_steps(history: Sequence[Remembered]) -> float | None:
    """Return the prompt tokens of all requests of a row over those of its first prompt, in earlier runs of the same
    work; None if none had steps."""
    stats = sum((each.run.row_stats + each.run.sample_row_stats for each in history if each.same_work), RowStats())
    first = stats.steps.get("", StepStats()).input_tokens
    return sum(step.input_tokens for step in stats.steps.values()) / first if first else None


def output_lengths(
    requests: Sequence[Request], history: Sequence[Remembered], growth: float = 1.0, step_tokens: int = 0
) -> OutputLengths:
    """Estimate generated tokens per bucket of prompt length from earlier runs of the same work, else from an
    assumption. Tasks generate none; a step that reads a task's row computes at most one row of logits, as for one
    token. growth: see `growth_by_steps`. step_tokens: maximum tokens of a row's steps."""
    if requests and all(request.task is not None for request in requests):
        return OutputLengths(Interval(0, 0, 0), (1,) * len(requests), "a task that generates nothing")
    max_tokens = np.array([request.params.max_tokens for request in requests] or [0])
    n = np.array([request.params.n for request in requests] or [1])
    runs = [each.run for each in history if each.same_work]
    stats = sum((run.row_stats + run.sample_row_stats for run in runs), RowStats())
    known = {bucket: histogram for bucket, histogram in stats.outputs.items() if histogram.count}
    if not known:
        # every sample has at floor one token
        share, floor = ASSUMED.times(float((max_tokens * n).mean())), float(n.mean())
        each = Interval(max(floor, share.low), max(floor, share.expected), max(floor, share.high))
        drawn = np.maximum(1, max_tokens * ASSUMED.expected).astype(int)
        source = f"an assumption: half of max_tokens, {max_tokens.mean():,.0f} on average"
        source += "" if n.mean() == 1 else f", of each of {n.mean():g} samples of a row"
        return OutputLengths(each, tuple(drawn.tolist()), source)
    everything = sum(known.values(), Histogram())
    rng = np.random.default_rng(0)
    drawn, mean, square_error = np.zeros(len(requests), dtype=int), 0.0, 0.0
    max_tokens += step_tokens
    buckets = np.array([length_bucket(round(growth * len(request.prompt_token_ids))) for request in requests])
    for bucket in np.unique(buckets).tolist():
        in_bucket = buckets == bucket
        counted = known.get(bucket, everything).values()
        values = np.repeat([value for value, _ in counted], [count for _, count in counted])
        drawn[in_bucket] = rng.choice(values, in_bucket.sum())
        share = in_bucket.mean()
        mean += share * float(np.minimum(values, max_tokens.max()).mean())
        square_error += (share * float(values.std()) / sqrt(len(values))) ** 2
    drawn = np.clip(drawn, 1, max_tokens)
    error = max(2 * sqrt(square_error), MIN_ERROR * mean)
    unit_name = "rows" if n.mean() == 1 else "samples"
    source = f"{everything.count:,} {unit_name} of {len(runs)} earlier run{'s' * (len(runs) > 1)} of this job"
    each = Interval(max(1.0, mean - error), mean, mean + error).times(float(n.mean()))
    return OutputLengths(each, tuple(drawn.tolist()), source)
