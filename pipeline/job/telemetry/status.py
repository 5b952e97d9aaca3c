"""What a running job shows: one small record, for the terminal and for `_pipeline/status.json`."""

from dataclasses import dataclass

from pipeline.report.json_record import JsonRecord


@dataclass(frozen=True)
class Status(JsonRecord):
    """`rows_done` counts rows that are finished, while the run goes on also those of units that are not written yet;
    `rows_written` the others. Tokens and rates are what this run computed, prompt tokens without those from cache;
    rates are over the last half minute. `eta_s` is None while unknown and when nothing is left. `warning` is the last
    that went wrong without ending the run, `told_at` the wall time, for people."""

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
    told_at: str = ""
