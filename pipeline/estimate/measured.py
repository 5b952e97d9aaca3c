"""Speed of a model on this machine, as earlier runs measured it.

An engine's time is one start-up, one load, a time per computed prompt token and a time per generated token. Steps with
few rows cost more per row. If a run was too small to fill its batch, as a probe is, the time of a token in a full batch
comes from a line fitted to the times of its plain steps over their rows. Drafts may reduce it further but need more
steps than a probe has. Idle time, rejected drafts and repeated work are a share of the computing time; idle time at the
end of a run does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.formatting import counted
from pipeline.job.planning.history import Remembered
from pipeline.report.estimate import Interval
from pipeline.report.record.row_stats import Computed, RowStats
from pipeline.report.record.run_record import RunRecord

MIN_SPREAD = 0.1  # smallest relative spread of a speed, as other processes use the machine too
NOTABLE_RATIO = 1.5  # report the ratio of the slowest run to the fastest from here on
MAX_RUNS = 3  # the newest runs represent the machine best
MIN_TOKEN_SHARE = 0.5  # ignore runs with less than this share of the largest run's tokens
DEFAULT_COMPARISON_COST = 2.0  # assumed time to compare a row with the reference model over the time to compute it
FULL_BATCH_SHARE = 0.8  # mean share of the batch from which on a run counts as full


@dataclass(frozen=True)
class PoolEstimate:
    """Estimate of a pool of engines with `num_cards` cards each. machine_us: of all engines together, until the last
    one ends. usd: None without a price."""

    machine: str
    actors: int
    wall_us: Interval
    machine_us: Interval
    usd: Interval | None = None
    spot_usd: Interval | None = None
    weights: str = ""
    basis: str = ""
    lacks: str = ""
    num_cards: int = 1


@dataclass(frozen=True)
class Speed:
    """Speed of one engine in microseconds. startup, load: once per actor. driver: once per run. overhead: time other
    than computing by phase, as a share of computing. fastest, slowest: time of the fastest and the slowest run over the
    time that this speed predicts for it."""

    startup_us: float
    load_us: float
    prompt_token_us: float
    generated_token_us: float
    overhead: Mapping[str, float]
    driver_us: float
    fastest: float
    slowest: float
    comes_from: str

    def compute_us(self, prompt_tokens: float, generated_tokens: float) -> float:
        busy_us = self.prompt_token_us * prompt_tokens + self.generated_token_us * generated_tokens
        return busy_us * (1 + sum(self.overhead.values()))


def measured_speed(
    history: Sequence[Remembered], rows: float, generates: bool = True, compared: float = 0.0
) -> Speed | None:
    """Return the speed, or None if no earlier run computed anything. history: newest first. rows: rows of the job per
    engine. generates: whether the job generates text; if not, runs that generated nothing count too. compared: the
    share of rows that a reference model reads (`quality.sample`)."""
    known = (each.run for each in history if each.run.computed.prompt)
    runs = [run for run in known if run.computed.generated or not generates]
    if not runs:
        return None
    max_tokens = max(run.computed.all for run in runs)
    large = [run for run in runs if run.computed.all >= MIN_TOKEN_SHARE * max_tokens]
    chosen = large[:MAX_RUNS]
    computed = sum((run.computed for run in chosen), Computed())
    prefill, decode = (sum(run.phase_us(phase) for run in chosen) for phase in ("prefill", "decode"))
    wasted, idle = (sum(run.phase_us(phase) for run in chosen) for phase in ("wasted", "idle"))
    idle -= sum(actor.tail_us for run in chosen for actor in run.actors)
    computing = max(1, prefill + decode)
    overhead = {"wasted": wasted / computing, "idle": idle / computing, "quality": compared * _comparison_cost(chosen)}
    last = next(run for run in runs if run.actors)
    actors = [actor for actor in last.actors if actor.stats.get("num_steps")]
    prompt_us, generated_us = prefill / computed.prompt, decode / max(1, computed.generated)
    times = [_time_over(run, prompt_us, generated_us) for run in chosen]
    ratio = max(times) / max(1e-9, min(times))
    spread_text = f", the slowest took {ratio:.1f} times as long as the fastest" if ratio >= NOTABLE_RATIO else ""
    source_text = f"{counted(len(chosen), 'earlier run')}{spread_text}, the last on {last.started_at[:10]}"
    return Speed(
        startup_us=sum(actor.phases_us["startup"] for actor in actors) / len(actors),
        load_us=sum(actor.phases_us["load"] for actor in actors) / len(actors),
        prompt_token_us=prompt_us,
        generated_token_us=_generated_us(chosen, generated_us, rows) if computed.generated else 0.0,
        overhead=overhead,
        driver_us=max(0, last.wall_us - max(actor.machine_us for actor in last.actors)),
        fastest=min(min(times), 1 / (1 + MIN_SPREAD)),
        slowest=max(max(times), 1 + MIN_SPREAD),
        comes_from=source_text,
    )


def _comparison_cost(runs: Sequence[RunRecord]) -> float:
    """Return the time to compare a row with the reference model over the time to compute one."""
    stats = sum((run.row_stats + run.sample_row_stats for run in runs), RowStats())
    rows = sum(bucket.rows for bucket in stats.lengths.values())
    computing_us = sum(run.phase_us("prefill") + run.phase_us("decode") for run in runs)
    if not (stats.quality.rows and rows and computing_us):
        return DEFAULT_COMPARISON_COST
    return sum(run.phase_us("quality") for run in runs) / stats.quality.rows / (computing_us / rows)


def _generated_us(runs: Sequence[RunRecord], measured: float, rows: float) -> float:
    """Return the time per generated token with a batch as full as `rows` make it. measured: with the runs' own
    batches."""
    sums = [
        sum(run.stat(f"plain_{name}") for run in runs) for name in ("steps", "rows", "rows_squared", "us", "rows_us")
    ]
    count, x, xx, y, xy = sums
    batch = min(rows, float(runs[0].resolved.get("max_num_seqs", 0)))
    spread = count * xx - x * x
    if not count or not spread or x / count >= FULL_BATCH_SHARE * batch:
        return measured
    row_us = max(0.0, (count * xy - x * y) / spread)
    step_us = max(0.0, (y - row_us * x) / count)
    return min(measured, row_us + step_us / batch)


def _time_over(run: RunRecord, prompt_us: float, generated_us: float) -> float:
    """Return a run's time over the time that these speeds predict for its tokens. The ratio is independent of its mix
    of prompt and generated tokens."""
    busy_us = run.phase_us("prefill") + run.phase_us("decode")
    return busy_us / max(1.0, prompt_us * run.computed.prompt + generated_us * run.computed.generated)
