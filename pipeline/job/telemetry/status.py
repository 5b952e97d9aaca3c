"""Status of a running job: one small record, for the terminal and for `_pipeline/status.json`."""

from dataclasses import dataclass

from pipeline.formatting import counted, duration, percent
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord


@dataclass(frozen=True)
class Status(JsonRecord):
    """Status of a run. `rows_done` counts finished rows, during a run including those of units that are not written
    yet; `rows_written` counts only written ones. Tokens and rates cover this run's computed tokens, without cached
    prompt tokens; rates are over the last half minute. `eta_s` is None while unknown and when nothing is left.
    `warning` is the last problem that did not end the run; `updated_at` is the wall time, for readers. `quality_rows`
    to `quality_drops` cover the rows compared with a reference model in all runs of the job."""

    run_id: str = ""
    phase: str = "planning"
    outcome: str = "running"
    rows_total: int = 0
    rows_done: int = 0
    rows_written: int = 0
    error_rows: int = 0
    units: int = 0
    actors: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    input_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    eta_s: float | None = None
    elapsed_s: float = 0.0
    warning: str = ""
    quality_rows: int = 0
    token_agreement: float | None = None
    quality_drops: tuple[str, ...] = ()
    updated_at: str = ""
    schema_version: int = SCHEMA_VERSION


def status_line(status: Status) -> str:
    """Return a status as one line of text."""
    if not any(work(status)):
        elapsed = f" ({duration(round(status.elapsed_s))})" if status.elapsed_s >= 1 else ""
        return f"{status.phase}{elapsed}"
    return f"{status.phase}: {percent(status.rows_done / max(1, status.rows_total))}, {counts(status)}"


def work(status: Status) -> tuple[int, ...]:
    """Return the counts that change with any progress."""
    return status.rows_done, status.error_rows, status.input_tokens, status.generated_tokens


def counts(status: Status) -> str:
    """Return rows as text, and during a run the rates and the remaining time."""
    if not any(work(status)):
        return ""
    counts = f"{status.rows_done:,}/{status.rows_total:,} rows"
    if status.error_rows:
        counts += f" ({counted(status.error_rows, 'error row')})"
    if status.token_agreement is not None:
        counts += f", token agreement {percent(status.token_agreement)}"
        counts += f" (ALARM: {', '.join(status.quality_drops)})" if status.quality_drops else ""
    if status.outcome != "running" or status.rows_done >= status.rows_total:
        return counts
    counts += f", {status.input_tokens_per_s:,.0f} tok/s in, {status.generated_tokens_per_s:,.0f} out"
    return counts if status.eta_s is None else f"{counts}, {duration(round(status.eta_s))} left"
