"""Earlier runs, as the history stores them."""

from dataclasses import replace

import pytest

from pipeline.job.planning.history import Remembered
from pipeline.report.record.row_stats import Histogram, RowStats
from pipeline.report.record.run_record import ActorRecord, RunRecord, no_phases


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))


def remembered(
    prompt=1000, generated=500, prefill_us=2000, decode_us=5000, outputs=None, same_work=True, wall_us=0, **stats
) -> Remembered:
    """Return a run with one actor, which started in 300 us and loaded in 700."""
    phases = no_phases() | {"startup": 300, "load": 700, "prefill": prefill_us, "decode": decode_us}
    actor = ActorRecord(0, phases, {"num_steps": 1, "prompt_tokens": prompt, "generated_tokens": generated, **stats})
    run = RunRecord("0001", "2026-11-24T00:00:00", actors=[actor], wall_us=wall_us or actor.machine_us,
                    resolved={"max_num_seqs": 64})  # fmt: skip
    histograms = {bucket: Histogram.from_values(values) for bucket, values in (outputs or {}).items()}
    return Remembered(replace(run, row_stats=RowStats(outputs=histograms)), same_work)
