"""Records of runs and the report over them, for the tests of reports."""

from dataclasses import replace

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.build import build_report
from pipeline.report.record.run_record import ActorRecord, RunRecord, no_phases
from pipeline.report.run_report import RunReport

TOTALS = PartTotals(180, 3, {"prompt_too_long": 2, "null_prompt": 0}, 2_000_000, 500, 500_000)


def run(usd: float | None = 1.0, outcome="finished", **phases: int) -> RunRecord:
    actor = ActorRecord(0, no_phases() | phases, {"generated_tokens": 300_000, "num_steps": 4, "batch_sum": 10})
    return RunRecord("run-1", "2026-01-01T00:00:00+00:00", outcome, 5_000_000, actors=[actor], hourly_usd=usd)


def delivering(run: RunRecord) -> RunRecord:
    """Return the run with everything that its engines generated in parts."""
    return replace(run, actors=[replace(actor, delivered_tokens=actor.computed) for actor in run.actors])


def report(*runs: RunRecord, **totals) -> RunReport:
    return build_report("job", "1a2b3c4d", runs, replace(TOTALS, **totals), 200)


def actor(number: int = 0, generated: int = 0, prompt: int = 0, **fields) -> ActorRecord:
    stats = {"generated_tokens": generated, "prompt_tokens": prompt + 40, "cached_tokens": 40, "num_preemptions": 0}
    return ActorRecord(number, no_phases() | fields.pop("phases", {}), stats | fields.pop("stats", {}), **fields)


def ended(outcome: str, *actors: ActorRecord, usd: float | None = 3.6, **fields) -> RunRecord:
    """Return a run with an outcome. At $3.6 per hour, a millisecond costs a millionth of a dollar."""
    return RunRecord("r", "", outcome, actors=list(actors), hourly_usd=usd, **fields)
