"""Records of runs and the report over them, for the tests of reports."""

from dataclasses import replace

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.build import build_report
from pipeline.report.record.row_stats import Computed, ErrorExample, Histogram, Latency, LengthBucket, RowStats
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
    return RunRecord(fields.pop("run_id", "r"), "", outcome, actors=list(actors), hourly_usd=usd, **fields)


def full_report() -> RunReport:
    """Return the report of a job with most sections: a killed run, a crash, error rows, and a finished run."""
    latency = Latency(
        Histogram.from_values([1_500] * 10), Histogram.from_values([20_000]), Histogram.from_values([4_000_000])
    )
    stats = RowStats(
        latency,
        {64: LengthBucket(90, 4000, 100, 900), 128: LengthBucket(80, 9000, 0, 300)},
        {"null_prompt": (ErrorExample("in/a.parquet", 7, "no\nprompt"),)},
        lost={"engine_failure": Computed(200, 100)},
    )
    killed = ended(
        "killed",
        actor(generated=1000, prompt=5000, delivered_tokens=Computed(4000, 700),
              stats={"num_steps": 40, "batch_sum": 400},
              phases={"startup": 2_000_000, "load": 4_000_000, "prefill": 10_000_000, "decode": 50_000_000}),
        run_id="0001-x", wall_us=70_000_000, rows_written=100, input_tokens=6000, generated_tokens=700,
    )  # fmt: skip
    finished = ended(
        "finished",
        actor(generated=700, prompt=8000, restarts=1, restart_us=1_000_000, crashed_us=500_000,
              restart_reasons=["signal SIGKILL"], delivered_tokens=Computed(7400, 500),
              crashed_tokens=Computed(200, 100), storage_retries={"throttled": 4},
              stats={"num_steps": 30, "batch_sum": 300, "num_preemptions": 2},
              phases={"startup": 2_000_000, "load": 4_000_000, "prefill": 9_000_000, "decode": 40_000_000,
                      "wasted": 500_000, "idle": 1_000_000}),
        run_id="0002-y", wall_us=60_000_000, rows_written=80, input_tokens=7000, generated_tokens=500,
        row_stats=stats, write_us=300_000, resolved={"device": "cpu", "max_num_seqs": 32},
    )  # fmt: skip
    totals = PartTotals(180, 3, {"engine_failure": 1, "null_prompt": 2}, 13_000, 100, 1200)
    return build_report("summaries", "1a2b3c4d" * 8, [killed, finished], totals, 180)
