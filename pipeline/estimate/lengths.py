"""How many tokens a job has: its prompts from a sample of them, its completions from runs before, or an assumption.

Intervals are of 95 %: of the prompts, two standard errors of the mean over the stretches that were read, as rows that
lie together are alike; of the completions, the same over the rows that earlier runs wrote.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from pipeline.data.source import Source, Window
from pipeline.data.units import MAX_BUDGET, window_units
from pipeline.engine.params import Request
from pipeline.job.actor.tokenize import Tokenize
from pipeline.job.planning.history import Remembered
from pipeline.job.planning.resolved_job import ResolvedJob
from pipeline.job.preview.prompt_preview import sampled
from pipeline.report.estimate import Interval
from pipeline.report.record.row_stats import Histogram, RowStats, length_bucket

MIN_ERROR = 0.03  # of a mean: what no sample rules out
ASSUMED = Interval(0.1, 0.5, 1.0)  # of max_tokens, where nothing is known


@dataclass(frozen=True)
class PromptSample:
    """rows were read, of which `errors` have no prompt that can be computed. shared: of the sample's prompt tokens,
    those in blocks that an earlier prompt of it had at its beginning. means: of prompt tokens, by stretch. repeated: of
    the prompts of rows with several samples, tokens after the last full block, which each further sample computes.
    reserved: tokens of the requests by which units of work are cut, those that they may generate among them."""

    requests: tuple[Request, ...]
    rows: int
    errors: int
    total_rows: int
    shared: float
    means: tuple[float, ...]
    repeated: int = 0
    reserved: int = 0

    @property
    def samples_each(self) -> float:
        """Of a row that is computed."""
        return fmean(request.params.n for request in self.requests) if self.requests else 1.0

    @property
    def tokens_each(self) -> Interval:
        """Of a row that is computed."""
        lengths = [len(request.prompt_token_ids) for request in self.requests]
        mean = fmean(lengths) if lengths else 0.0
        if self.rows >= self.total_rows or len(self.means) < 2:
            return Interval(mean, mean, mean)
        error = 2 * stdev(self.means) / sqrt(len(self.means)) * sqrt(1 - self.rows / self.total_rows)
        return Interval(max(0.0, mean - error), mean, mean + error)


def sample_prompts(
    job: ResolvedJob, source: Source, tokenize: Tokenize, rows: int, block_size: int, context: int
) -> PromptSample:
    """Read about so many rows, evenly spread over the input, and tokenize them. context: the most tokens of a prompt
    and its completion. Prompts that it has no room for are errors, and requests generate no more than it leaves."""
    limit = job.config.input.limit
    total = source.num_rows if limit is None else min(limit, source.num_rows)
    requests: list[Request] = []
    means: list[float] = []
    errors = reserved = 0
    for window in sampled(total, rows):
        of_window = list(_requests(job, source, window, tokenize))
        every = [request for requests, _ in of_window for request in requests]
        fitting = [r for r in every if len(r.prompt_token_ids) <= context - (r.task is None)]
        found = [_inside(request, context) for request in fitting]
        errors += sum(failed for _, failed in of_window) + len(every) - len(found)
        reserved += sum(len(r.prompt_token_ids) + min(r.max_tokens * r.params.n, MAX_BUDGET) for r in fitting)
        requests += found
        if found:
            means.append(fmean(len(request.prompt_token_ids) for request in found))
    repeated = sum((r.params.n - 1) * tail(len(r.prompt_token_ids), block_size) for r in requests)
    return PromptSample(
        tuple(requests),
        len(requests) + errors,
        errors,
        total,
        _shared(requests, block_size),
        tuple(means),
        repeated,
        reserved,
    )


def _inside(request: Request, context: int) -> Request:
    """`request`, which generates no more than the context leaves."""
    room = context - len(request.prompt_token_ids)
    if request.max_tokens <= room:
        return request
    params = replace(request.params, max_tokens=room, min_tokens=min(room, request.params.min_tokens))
    return replace(request, params=params)


def tail(prompt_tokens: int, block_size: int) -> int:
    """Tokens of a prompt that a sample computes whose full blocks are there: its last one at least."""
    return prompt_tokens - max(0, prompt_tokens - 1) // block_size * block_size


def _requests(
    job: ResolvedJob, source: Source, window: Window, tokenize: Tokenize
) -> Iterator[tuple[list[Request], int]]:
    for unit in window_units(source, window, job.prompt_units):
        requests, failed = tokenize(unit)
        yield requests, len(failed)


def _shared(requests: Sequence[Request], block_size: int) -> float:
    """The share of prompt tokens that are in whole blocks which a prompt before began with; never a prompt's last
    token, which is always computed, and none where all are read."""
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
    """Generated tokens: the mean of a row, all its samples together, and for each request of a sample of the job how
    many one of its samples may have. `come_from`: for people."""

    each: Interval
    drawn: tuple[int, ...]
    come_from: str


def output_lengths(requests: Sequence[Request], history: Sequence[Remembered]) -> OutputLengths:
    """From runs of the same work by bucket of prompt length; else from the assumption. Rows that are asked a task have
    none; a step that reads one computes a row of logits at most, as for one token."""
    if requests and all(request.task is not None for request in requests):
        return OutputLengths(Interval(0, 0, 0), (1,) * len(requests), "a task that generates nothing")
    most = np.array([request.params.max_tokens for request in requests] or [0])
    n = np.array([request.params.n for request in requests] or [1])
    runs = [each.run for each in history if each.same_work]
    stats = sum((run.row_stats + run.sample_row_stats for run in runs), RowStats())
    known = {bucket: histogram for bucket, histogram in stats.outputs.items() if histogram.count}
    if not known:
        share, least = ASSUMED.times(float((most * n).mean())), float(n.mean())  # a sample has a token at least
        each = Interval(max(least, share.low), max(least, share.expected), max(least, share.high))
        drawn = np.maximum(1, most * ASSUMED.expected).astype(int)
        told = f"an assumption: half of max_tokens, {most.mean():,.0f} on average" + _of_samples(float(n.mean()))
        return OutputLengths(each, tuple(drawn.tolist()), told)
    everything = sum(known.values(), Histogram())
    rng = np.random.default_rng(0)
    drawn, mean, square_error = np.zeros(len(requests), dtype=int), 0.0, 0.0
    buckets = np.array([length_bucket(len(request.prompt_token_ids)) for request in requests])
    for bucket in np.unique(buckets).tolist():
        here = buckets == bucket
        counted = known.get(bucket, everything).values()
        values = np.repeat([value for value, _ in counted], [count for _, count in counted])
        drawn[here] = rng.choice(values, here.sum())
        share = here.mean()
        mean += share * float(np.minimum(values, most.max()).mean())
        square_error += (share * float(values.std()) / sqrt(len(values))) ** 2
    drawn = np.clip(drawn, 1, most)
    error = max(2 * sqrt(square_error), MIN_ERROR * mean)
    what = "rows" if n.mean() == 1 else "samples"
    told = f"{everything.count:,} {what} of {len(runs)} earlier run{'s' * (len(runs) > 1)} of this job"
    each = Interval(max(1.0, mean - error), mean, mean + error).times(float(n.mean()))
    return OutputLengths(each, tuple(drawn.tolist()), told)


def _of_samples(n: float) -> str:
    return "" if n == 1 else f", of each of {n:g} samples of a row"
