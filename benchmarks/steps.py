"""Compare one job with steps with the same prompts as jobs one after the other: `python -m benchmarks.steps`.

Each row has a text of about 512 tokens: a completion, a choice about it, and a second completion. Both ways compute the
same texts (greedy, float32), which is checked. Rounds alternate; times are those of whole runs of the embedded model,
with start and load, and of the engine alone (prefill and decode).
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import load_job
from pipeline.job.running.run import run_job
from pipeline.report.run_report import RunReport

REPORT = "Client: Garpol. Engineer: Nura Renni. Device: furnace 724. Problem: no power. Cost: $1517. "
FIRST = "{text}\nSummary:"
CHECK = "{text}\nSummary: {draft} Right?"
BETTER = "{text}\nSummary: {draft} Right?{check.label} Better:"
CHOICE = {"type": "choice", "labels": [" yes", " no"]}


@click.command(help=__doc__)
@click.option("--rows", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--max-tokens", default=24, show_default=True, help="Of each completion.")
def main(rows: int, rounds: int, max_tokens: int) -> None:
    sampling, apart, together, cached = {"max_tokens": max_tokens}, [], [], 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            table = pa.table({"id": range(rows), "text": [f"Visit {i}. " + REPORT * 15 for i in range(rows)]})
            steps = [
                {"name": "check", "prompt": {"template": CHECK}, "task": CHOICE},
                {"name": "better", "prompt": {"template": BETTER}, "sampling": sampling, "replaces": "draft"},
            ]
            job = {"prompt": {"template": FIRST}, "sampling": sampling}
            one, whole = _run(folder / "together", table, **job, steps=steps)
            together.append(_times([whole]))
            check = whole.steps[1].completed
            cached = check.cached_tokens / check.input_tokens
            first, report_1 = _run(folder / "first", table, **job)
            table = table.append_column("draft", pa.array([row["generated_text"] for row in first]))
            second, report_2 = _run(folder / "second", table, prompt={"template": CHECK}, task=CHOICE)
            table = table.append_column("check", pa.array([{"label": row["label"]} for row in second]))
            third, report_3 = _run(folder / "third", table, prompt={"template": BETTER}, sampling=sampling)
            apart.append(_times([report_1, report_2, report_3]))
            assert [row["generated_text"] for row in one] == [row["generated_text"] for row in third]
    for label, times in (("one job with steps", together), ("three jobs", apart)):
        whole_s, engine_s = (median(column) for column in zip(*times))
        print(f"{label}: {whole_s:.1f} s, of which the engine {engine_s:.1f} s (median of {rounds}, {rows} rows)")
    print(f"prompt tokens of the first step from the cache: {cached:.1%}")


def _run(folder: Path, table: pa.Table, **sections: Any) -> tuple[list[dict[str, Any]], RunReport]:
    folder.mkdir()
    pq.write_table(table, folder / "in.parquet")
    job = {
        "input": {"path": str(folder / "in.parquet"), "columns": ["id"]},
        "model": "demo",
        "engine": {"device": "cpu", "dtype": "float32", "max_num_seqs": 16},
        "output": {"path": str(folder / "out")},
        **sections,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    report = run_job(load_job(folder / "job.yaml"))
    rows = [row for part in (folder / "out").glob("part-*") for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"]), report


def _times(reports: list[RunReport]) -> tuple[float, float]:
    """Return the seconds of the runs, and those of their engines without start, load and idling."""
    engine_us = sum(report.phases_us[phase] for report in reports for phase in ("prefill", "decode", "wasted"))
    return sum(report.wall_us for report in reports) / 1e6, engine_us / 1e6


if __name__ == "__main__":
    main()
