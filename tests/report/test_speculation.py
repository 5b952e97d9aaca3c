"""Speculative decoding in the report: sums over actors and runs, as text and tables."""

import json

from pipeline.data.output.part_totals import PartTotals
from pipeline.engine.speculation.counts import SpeculationCounts
from pipeline.report.build import build_report
from pipeline.report.features import Speculation
from pipeline.report.record.run_record import ActorRecord, RunRecord, no_phases
from pipeline.report.render import markdown, text
from pipeline.report.run_report import RunReport


def counts(**by_batch: dict[int, int]) -> dict[str, int]:
    made = SpeculationCounts()
    for name, values in by_batch.items():
        for bucket, value in values.items():
            getattr(made, name)[bucket] = value
    return made.flat()


STATS = {
    **{"num_steps": 100, "num_draft_steps": 40},
    **{
        "drafted_by_position.0": 50,
        "accepted_by_position.0": 40,
        "drafted_by_position.1": 20,
        "accepted_by_position.1": 5,
    },
}
COUNTED = counts(
    plain_steps={5: 60}, drafted_steps={0: 40}, on_steps={0: 38, 5: 3}, drafted_sequences={0: 40},
    drafted_step_tokens={0: 85}, draft_tokens={0: 70}, accepted_tokens={0: 45}, spent_us={0: 400_000, 5: 1_000},
    plain_us={0: 850_000},
)  # fmt: skip


def run(*stats: dict[str, int]) -> RunRecord:
    actors = [ActorRecord(number, no_phases() | {"decode": 10**6}, each) for number, each in enumerate(stats)]
    return RunRecord("run-1", "2026-01-01T00:00:00+00:00", "finished", 5_000_000, actors=actors, hourly_usd=1.0)


def report(*runs: RunRecord) -> RunReport:
    return build_report("job", "1a2b3c4d", runs, PartTotals(3, 1, {}, 9, 0, 9), 3)


def test_sums_over_actors_and_runs() -> None:
    found = Speculation.from_runs([run(STATS | COUNTED, STATS | COUNTED), run(STATS | COUNTED)])
    assert (found.steps, found.draft_steps) == (300, 120)
    assert (found.draft_tokens_by_position, found.accepted_tokens_by_position) == ((150, 60), (120, 15))
    assert found.rejected_tokens == 75
    assert found.saved_us == 3 * (850_000 - 401_000)
    assert [(line.batch, line.plain_steps, line.drafted_steps, line.on_steps) for line in found.batches] == [
        ("1", 0, 120, 114),
        ("32-63", 180, 0, 9),
    ]
    assert found.batches[0].tokens_per_sequence_step == 85 / 40


def test_the_report_shows_it_and_reads_it_back() -> None:
    built = report(run(STATS | COUNTED))
    shown, page = text(built), markdown(built)
    words = " ".join(shown.split())
    assert "in 40 of 100 steps; 45 of 70 draft tokens accepted, by position 80%, 25%; about 449 ms saved" in words
    assert "| 32-63 | 60 | 0 |  | -1 ms |" in page
    again = RunReport.from_json(json.loads(json.dumps(built.to_json())))
    assert again.speculation == built.speculation
    assert text(again) == shown


def test_without_drafts_the_report_does_not_mention_them() -> None:
    built = report(run({"num_steps": 100}))
    assert built.speculation is None
    assert "raft" not in text(built) + markdown(built)


def test_forced_drafts_and_drafts_that_would_not_pay() -> None:
    assert "forced in every step" in " ".join(text(report(run(STATS))).split())
    never = report(run({"num_steps": 60} | counts(plain_steps={5: 60})))
    assert "off (plain decoding was faster)" in text(never)
    lost = counts(plain_steps={0: 60}, drafted_steps={0: 40}, spent_us={0: 900_000}, plain_us={0: 500_000})
    assert "about 400 ms lost" in " ".join(text(report(run(STATS | lost))).split())
