"""How fast this machine computes a model, as runs before measured it.

An engine's time is start-up and load, once each, and then so much for each prompt token that is computed and each token
that is generated. Steps with few rows are dearer for each of them: where a run was too small to fill its batch, as a
probe is, a token generated in a full one is taken from the line that fits the times of its plain steps by their rows.
Drafts, which may make it cheaper still, need more steps than a probe has to prove themselves. Time at rest, rejected
drafts and work done twice are a share of the rest; the idle time at a run's end is none of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.formatting import counted
from pipeline.job.planning.history import Remembered
from pipeline.report.record.row_stats import Computed, RowStats
from pipeline.report.record.run_record import RunRecord

MIN_SPREAD = 0.1  # of a speed, on a machine that others use too
TOLD_APART = 1.5  # how many times as long as another a run took, that it is said
MAX_RUNS = 3  # the newest say most about now
FEW_TOKENS = 0.5  # of those of the largest run, below which a run beside it says little
COMPARED = 2.0  # rows that a row takes which is compared with a reference model, where no run before compared any
FULL = 0.8  # of its batch that a run has to fill, on average, to be taken as it is


@dataclass(frozen=True)
class Speed:
    """Microseconds. start-up, load and driver: once each, of an actor and of the run. beside: by phase, what came
    beside the time of computing, as a share of it. fastest, slowest: what the fastest and the slowest run took for
    their tokens, over what this speed makes of them."""

    startup_us: float
    load_us: float
    prompt_token_us: float
    generated_token_us: float
    beside: Mapping[str, float]
    driver_us: float
    fastest: float
    slowest: float
    comes_from: str

    def compute_us(self, prompt_tokens: float, generated_tokens: float) -> float:
        busy_us = self.prompt_token_us * prompt_tokens + self.generated_token_us * generated_tokens
        return busy_us * (1 + sum(self.beside.values()))


def measured_speed(
    history: Sequence[Remembered], rows: float, generates: bool = True, compared: float = 0.0
) -> Speed | None:
    """None where no run before computed anything. history: the newest first. rows: of the job, for each engine.
    generates: whether the job does; else runs that generated nothing tell its speed too. compared: the share of rows
    that a reference model reads (`quality.sample`)."""
    known = (each.run for each in history if each.run.computed.prompt)
    runs = [run for run in known if run.computed.generated or not generates]
    if not runs:
        return None
    most = max(run.computed.all for run in runs)
    large = [run for run in runs if run.computed.all >= FEW_TOKENS * most]  # a probe beside whole runs says little
    chosen = large[:MAX_RUNS]
    computed = sum((run.computed for run in chosen), Computed())
    prefill, decode = (sum(run.phase_us(phase) for run in chosen) for phase in ("prefill", "decode"))
    wasted, idle = (sum(run.phase_us(phase) for run in chosen) for phase in ("wasted", "idle"))
    idle -= sum(actor.tail_us for run in chosen for actor in run.actors)
    computing = max(1, prefill + decode)
    beside = {"wasted": wasted / computing, "idle": idle / computing, "quality": compared * _compared_row(chosen)}
    last = next(run for run in runs if run.actors)
    actors = [actor for actor in last.actors if actor.stats.get("num_steps")]
    prompt_us, generated_us = prefill / computed.prompt, decode / max(1, computed.generated)
    times = [_time_over(run, prompt_us, generated_us) for run in chosen]
    apart = max(times) / max(1e-9, min(times))
    far = f", the slowest {apart:.1f} times as long as the fastest" if apart >= TOLD_APART else ""
    told = f"{counted(len(chosen), 'run')} on this machine{far}, the last one {last.started_at[:10]}"
    return Speed(
        startup_us=sum(actor.phases_us["startup"] for actor in actors) / len(actors),
        load_us=sum(actor.phases_us["load"] for actor in actors) / len(actors),
        prompt_token_us=prompt_us,
        generated_token_us=_generated_us(chosen, generated_us, rows) if computed.generated else 0.0,
        beside=beside,
        driver_us=max(0, last.wall_us - max(actor.machine_us for actor in last.actors)),
        fastest=min(min(times), 1 / (1 + MIN_SPREAD)),
        slowest=max(max(times), 1 + MIN_SPREAD),
        comes_from=told,
    )


def _compared_row(runs: Sequence[RunRecord]) -> float:
    """What it takes to compare a row with the reference model, by what it takes to compute one."""
    stats = sum((run.row_stats + run.sample_row_stats for run in runs), RowStats())
    rows = sum(bucket.rows for bucket in stats.lengths.values())
    computing_us = sum(run.phase_us("prefill") + run.phase_us("decode") for run in runs)
    if not (stats.quality.rows and rows and computing_us):
        return COMPARED
    return sum(run.phase_us("quality") for run in runs) / stats.quality.rows / (computing_us / rows)


def _generated_us(runs: Sequence[RunRecord], measured: float, rows: float) -> float:
    """Of a generated token, with the batch as full as `rows` make it. measured: with the batch as it was."""
    sums = [
        sum(run.stat(f"plain_{name}") for run in runs) for name in ("steps", "rows", "rows_squared", "us", "rows_us")
    ]
    count, x, xx, y, xy = sums
    batch = min(rows, float(runs[0].resolved.get("max_num_seqs", 0)))
    spread = count * xx - x * x
    if not count or not spread or x / count >= FULL * batch:
        return measured
    a_row_us = max(0.0, (count * xy - x * y) / spread)
    a_step_us = max(0.0, (y - a_row_us * x) / count)
    return min(measured, a_row_us + a_step_us / batch)


def _time_over(run: RunRecord, prompt_us: float, generated_us: float) -> float:
    """What a run took for its tokens, over what tokens of these times would have: jobs differ in how many of theirs are
    prompts, and that makes none slower than another."""
    busy_us = run.phase_us("prefill") + run.phase_us("decode")
    return busy_us / max(1.0, prompt_us * run.computed.prompt + generated_us * run.computed.generated)
