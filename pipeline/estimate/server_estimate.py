"""Estimate a job whose rows a server computes.

The server's hardware and batches are unknown, so nothing is simulated: the tokens and the time of a row are those of
earlier runs of the same work. docs/servers.md describes it.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC
from math import sqrt
from typing import Any

import numpy as np

from pipeline.checkpoints.locate import folder_here
from pipeline.data.units import window_units
from pipeline.endpoint.spec import EndpointConfig
from pipeline.errors import ModelError
from pipeline.estimate.image_sample import image_tokens_of_a_row
from pipeline.estimate.lengths import MIN_ERROR, sample_prompts
from pipeline.estimate.measured import MAX_RUNS, MIN_SPREAD, MIN_TOKEN_SHARE, PoolEstimate
from pipeline.formatting import counted
from pipeline.job.planning.history import Remembered
from pipeline.job.planning.plan import JobPlan
from pipeline.job.preview.prompt_preview import sampled
from pipeline.machine.host import wall_time, zone_time
from pipeline.report.estimate import Estimate, Interval
from pipeline.report.record.row_stats import Histogram, RowStats
from pipeline.report.record.run_record import PHASES, RunRecord
from pipeline.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServerEstimate:
    """Estimate of a job on a server. prompts: tokens of the rows that are left; None if unknown. estimate: None without
    an earlier run. here: the time and cost with each number of engines to compare. doubts: sentences."""

    job: str
    rows: int
    rows_left: int
    prompts: Interval | None
    estimate: Estimate | None = None
    here: tuple[PoolEstimate, ...] = ()
    doubts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_on_server(
    plan: JobPlan, history: Sequence[Remembered], rows_left: int, runs_before: int, counts: Sequence[int], sample: int
) -> ServerEstimate:
    """Estimate a job without contact to its server. history: newest first. runs_before: see `Estimate`. counts: numbers
    of engines to compare. sample: number of prompts to tokenize without an earlier run."""
    config, runs = plan.job.config, representative_runs(history)
    if not runs or not rows_left:
        prompts = _sampled_prompts(plan, rows_left, sample) if rows_left else None
        return ServerEstimate(config.name, plan.num_rows, rows_left, prompts)
    rows = _computed_rows(plan, rows_left, sample)
    made = {actors: _estimate(plan, runs, rows, runs_before, actors) for actors in (config.run.pool[1], *counts)}
    own = made[config.run.pool[1]]
    prompts = own.prompt_tokens + Interval(*[own.cached_tokens] * 3)
    here = tuple(PoolEstimate("server", n, made[n].wall_us, made[n].machine_us, made[n].usd) for n in counts)
    doubts = tuple(_doubts(runs, _short_of(plan, runs, rows / own.actors)))
    return ServerEstimate(config.name, plan.num_rows, rows_left, prompts, own, here, doubts)


def _computed_rows(plan: JobPlan, rows_left: int, sample: int) -> int:
    """Return the number of rows that meet `input.when`, by a sample of the input."""
    if plan.job.config.input.when is None:
        return rows_left
    windows = sampled(plan.num_rows, sample)
    units = [unit for window in windows for unit in window_units(plan.source, window, plan.job.prompt_units)]
    rows = sum(unit.num_rows for unit in units)
    return rows_left * (rows - sum(len(unit.dropped()) for unit in units)) // rows


def representative_runs(history: Sequence[Remembered]) -> list[RunRecord]:
    """Return the newest of the large runs of the same work, by the model of the last one."""
    runs = [each.run for each in history if each.same_work and _answers(each.run)]
    runs = [run for run in runs if run.resolved.get("model") == runs[0].resolved.get("model")]
    most = max(map(_answers, runs), default=0)
    return [run for run in runs if _answers(run) >= MIN_TOKEN_SHARE * most][:MAX_RUNS]


def _estimate(plan: JobPlan, runs: Sequence[RunRecord], rows: int, runs_before: int, actors: int) -> Estimate:
    """Estimate `rows` rows on `actors` engines. runs: newest first."""
    cost, last, model, answers = plan.job.config.cost, runs[0], runs[0].resolved.get("model"), sum(map(_answers, runs))
    names = ("prompt_tokens", "cached_tokens", "generated_tokens")
    prompt, cached, generated = (sum(run.stat(name) for run in runs) * rows / answers for name in names)
    stats = sum((run.row_stats + run.sample_row_stats for run in runs), RowStats())
    prompts = [(bucket.input_tokens // bucket.rows, bucket.rows) for bucket in stats.lengths.values() if bucket.rows]
    phases = {phase: sum(run.phase_us(phase) for run in runs) * rows // answers for phase in PHASES}
    phases["idle"] -= sum(map(_tail_us, runs)) * rows // answers
    phases |= {phase: last.phase_us(phase) * actors // len(last.actors) for phase in ("startup", "load")}
    start_us = phases["startup"] + phases["load"]
    work_us = sum(phases.values()) - start_us
    ratios = [_work_us(run) / _answers(run) * rows / max(1, work_us) for run in runs]
    low, high = min(*ratios, 1 / (1 + MIN_SPREAD)), max(*ratios, 1 + MIN_SPREAD)
    if (short := _short_of(plan, runs, rows / actors)) is not None:
        low = min(low, short.num_open / short.reachable)
    min_work_us = _limited_us(plan, rows, prompt + generated)
    phases["idle"] += max(0, min_work_us - work_us)
    machine = Interval(*(start_us + max(min_work_us, work_us * ratio) for ratio in (low, 1, high)))
    driver_us = max(0, last.wall_us - max(actor.machine_us for actor in last.actors))
    return Estimate(
        made_at=zone_time(UTC).isoformat(timespec="seconds"),
        runs_before=runs_before,
        rows=rows,
        prompt_tokens=_around(prompt - cached, prompts),
        cached_tokens=cached,
        generated_tokens=_around(generated, sum(stats.outputs.values(), Histogram()).values()),
        machine_us=machine,
        wall_us=machine.times(1 / actors) + Interval(*[driver_us] * 3),
        phases_us=phases,
        hourly_usd=cost.hourly_usd,
        speeds_from=f"{counted(len(runs), 'run')} with {model}, the last one {last.started_at[:10]}",
        lengths_from=f"{answers:,} rows of {counted(len(runs), 'earlier run')} of this job",
        actors=actors,
        job=plan.fingerprint.undated,
        usd_per_million=dict(cost.prices.usd_per_million),
    )


def _limited_us(plan: JobPlan, rows: float, tokens: float) -> int:
    """Return the time that the job's limits of a minute leave for requests and tokens."""
    engine = plan.job.work_config()
    assert isinstance(engine, EndpointConfig)
    minutes = [0.0]
    minutes += [rows / engine.requests_per_minute] if engine.requests_per_minute else []
    minutes += [tokens / engine.tokens_per_minute] if engine.tokens_per_minute else []
    return int(max(minutes) * 60e6)


def _answers(run: RunRecord) -> int:
    return run.stat("num_requests")


def _tail_us(run: RunRecord) -> int:
    """Return the time for which engines waited for the last one: it does not grow with the number of rows."""
    return sum(actor.tail_us for actor in run.actors)


def _work_us(run: RunRecord) -> int:
    return run.machine_us - run.phase_us("startup") - run.phase_us("load") - _tail_us(run)


@dataclass(frozen=True)
class _Short:
    """Open requests of an engine: the mean of runs that were short, and the number that a longer run may reach."""

    num_open: float
    reachable: float


def _short_of(plan: JobPlan, runs: Sequence[RunRecord], rows: float) -> _Short | None:
    """Return None if `runs` were long enough to open about as many requests as a run of `rows` rows on each engine."""
    engine = plan.job.work_config()
    assert isinstance(engine, EndpointConfig)
    servers, answers = max(1, len(engine.urls)), sum(map(_answers, runs))
    reachable = min(rows, servers * engine.max_concurrency)
    if max(_answers(run) / len(run.actors) for run in runs) >= MIN_TOKEN_SHARE * reachable:
        return None
    return _Short(sum(run.stat("batch_sum") for run in runs) / answers * servers, reachable)


def _doubts(runs: Sequence[RunRecord], short: _Short | None) -> Iterator[str]:
    if short is not None:
        yield (
            f"measured with {short.num_open:,.0f} open requests on average. A longer run opens up to "
            f"{short.reachable:,.0f}, so it probably takes less time than expected here; low assumes that the server "
            "answers them as fast"
        )
    if unmetered := sum(run.unmetered.get("num_unmetered", 0) for run in runs):
        yield f"{unmetered:,} requests are of unknown usage, which is missing in tokens and cost"


def _around(total: float, lengths: Iterable[tuple[int, int]]) -> Interval:
    """Return two standard errors around a sum of tokens. lengths: tokens of a row, and the number of such rows."""
    values = np.repeat(*np.array([*lengths], dtype=int).reshape(-1, 2).T)
    error = MIN_ERROR
    if values.any():
        error = max(error, 2 * float(values.std() / values.mean()) / sqrt(len(values)))
    return Interval(max(0.0, total * (1 - error)), total, total * (1 + error))


def _sampled_prompts(plan: JobPlan, rows_left: int, rows: int) -> Interval | None:
    """Return the prompt tokens of a sample, for all rows that are left; None without a tokenizer on this machine, or
    with images of a model whose formula is unknown."""
    model = plan.job.config.model
    with suppress(ModelError):  # a run sends chats without the template of this tokenizer
        folder = folder_here(model.path, model.revision)
        if folder is not None:
            tokenize = plan.job.tokenize(Tokenizer.from_folder(str(folder), None), wall_time())
            found = sample_prompts(plan, tokenize, rows, 1, sys.maxsize)
            images = image_tokens_of_a_row(plan, folder)
            if not found.requests or images is None:
                return None
            return (found.tokens_each + images).times(rows_left * len(found.requests) / found.rows)
    return None
