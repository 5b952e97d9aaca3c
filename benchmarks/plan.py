"""Measure the driver's time and memory for large jobs of growing sizes.

    python -m benchmarks.plan
    python -m benchmarks.plan --scale 1 --repeats 3 --json

The dataset is real Parquet, with a different footer in each file and row groups of realistic size, but only one value
in each column: up to 10,000 files with 10^9 rows, removed at the end. This takes a few minutes and about 1 GB of disk.
Names and footers of parts are created in memory, so the figures exclude disk and store time. Execution is simulated:
read tasks and summaries of all units, without Ray. A new process measures each figure.
"""

import io
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import facts_to_text, last_line, machine_facts, table
from benchmarks.script import json_flag, progress, report, script
from pipeline.config import load_job
from pipeline.config.sections.limits import CostSection
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore, serialize
from pipeline.data.source import InputWindow, narrowed, window_checksums
from pipeline.job.output.success import count_rows
from pipeline.job.planning.plan import JobPlan, make_plan, remaining_windows
from pipeline.job.telemetry.run_log import RunLog
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.job.telemetry.writer import Telemetry
from pipeline.machine.interpreter import child_environment
from pipeline.report.record.row_stats import LengthBucket, RowStats, Timing, latency_of
from pipeline.stores.local_folder import LocalFolder
from pipeline.stores.retries import RetryCounts

ROOT = Path(__file__).parents[1]
ROW_GROUPS = 10
COLUMNS = 8
STAGES = ("plan", "resume", "execute", "verify")
MARK = b"number-000000000000"  # in each footer, replaced so that footers differ


class ListedParts(LocalFolder):
    """Folder with the parts of a job. is_stopped: one unit of every tenth window is missing."""

    def __init__(self, plan: JobPlan, parts_per_window: int, is_stopped: bool) -> None:
        super().__init__(plan.job.config.output.path)
        self._plan, self._num_units, self._is_stopped = plan, parts_per_window, is_stopped
        self._part = cache(lambda rows: _part(plan.schema, rows))
        self._checksums = window_checksums(plan.source, plan.windows)

    def each_name(self) -> Iterator[str]:
        short, num_units = self._plan.fingerprint.short, self._num_units
        for window in self._plan.windows:
            last = str(PartName(short, window.index, num_units - 1, num_units, 0))
            head = last.split(f"-u{num_units - 1:04d}")[0]
            for unit in range(num_units - (self._is_stopped and window.index % 10 == 0)):
                yield f"{head}-u{unit:04d}of{num_units:04d}-n{_share(window, unit, num_units)}.parquet"

    def tail(self, name: str, length: int) -> bytes:
        """Return the end of a part. The first part of a window has the checksum of all rows of the window."""
        part = PartName.parse(name)
        assert part is not None
        checksum = 0 if part.unit else self._checksums[part.window]
        data, own = self._part(part.rows)
        return data[-length:].replace(own.encode(), b"%016x" % checksum)


def _share(window: InputWindow, unit: int, num_units: int) -> int:
    return window.num_rows // num_units + (unit < window.num_rows % num_units)


def _part(schema: pa.Schema, rows: int) -> tuple[bytes, str]:
    """Return a part of `rows` rows, and the checksum in its footer."""
    table = pa.table([pa.nulls(rows, field.type) for field in schema], schema=schema)
    totals = PartTotals.of_table(table)
    return serialize(table, {"pipeline.job": "x" * 2000}, totals), totals.checksum_hex


def resume(plan: JobPlan, store: PartStore, parts_per_window: int) -> None:
    store.folder = ListedParts(plan, parts_per_window, is_stopped=True)
    tasks = remaining_windows(plan, store.list(plan.fingerprint.short))
    assert len(tasks) == -(-len(plan.windows) // 10), "every tenth window is left"


def execute(plan: JobPlan, store: PartStore, parts_per_window: int) -> list[bytes]:
    """Do the driver's work during execution: create a read task for each window, and record the units' summaries."""
    tasks = [pickle.dumps(needed) for needed in narrowed(plan.source, plan.windows)]
    log = RunLog(store, {}, CostSection(), {}, Telemetry(store.folder), RetryCounts())
    latency = latency_of([Timing(0, 100_000 + 5000 * i, 2_000_000 + 9000 * i, 100) for i in range(512)])
    rows = RowStats(latency, {500: LengthBucket(512, 512 * 500, 0, 512 * 100)})
    summary = UnitSummary(0, 0, PartTotals(512, 1, {}, 512 * 500, 0, 512 * 100), True, rows)
    text = json.dumps(summary.to_json())
    for _ in range(len(plan.windows) * parts_per_window):
        log.add(UnitSummary.from_json(json.loads(text)))
    assert log.written.units == len(plan.windows) * parts_per_window
    return tasks


def verify_parts(plan: JobPlan, store: PartStore, parts_per_window: int) -> None:
    store.folder = ListedParts(plan, parts_per_window, is_stopped=False)
    assert count_rows(plan, store).units == len(plan.windows) * parts_per_window


AFTER_PLAN = {"resume": resume, "execute": execute, "verify": verify_parts}


def measure_stage(job: str, stage: str, parts_per_window: int) -> dict[str, Any]:
    """Plan the job and run one more stage in this process. Bytes: growth of the resident set to its peak."""
    config = load_job(job)
    began = _begin()
    plan = make_plan(config, "cpu")
    plan_s, plan_bytes = _spent(began)
    began = _begin()
    AFTER_PLAN[stage](plan, PartStore(config.output.path), parts_per_window)
    seconds, memory = _spent(began)
    found = {"plan_s": plan_s, "plan_bytes": plan_bytes} if stage == "resume" else {}
    counts = {"rows": plan.num_rows, "windows": len(plan.windows), "parts": len(plan.windows) * parts_per_window}
    return counts | found | {f"{stage}_s": seconds, f"{stage}_bytes": memory}


def _memory() -> dict[str, int]:
    """Return this process's memory in bytes by name in /proc: VmRSS is current, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _begin() -> tuple[float, int]:
    """Reset the memory peak. Returns the current time and memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return time.perf_counter(), _memory()["VmRSS"]


def _spent(began: tuple[float, int]) -> tuple[float, int]:
    return time.perf_counter() - began[0], max(0, _memory()["VmHWM"] - began[1])


def parquet_template(rows: int) -> bytes:
    """Return a small Parquet file of `rows` rows. Each column has a single value, encoded as a dictionary and a run."""
    text = pa.scalar("A line of text as it may stand in a report.")
    columns: dict[str, pa.Array] = {"id": pa.repeat(pa.scalar(7, pa.int64()), rows), "text": pa.repeat(text, rows)}
    columns |= {f"number_{i}": pa.repeat(pa.scalar(i + 0.5), rows) for i in range(COLUMNS - len(columns))}
    sink = io.BytesIO()
    data = pa.table(columns).replace_schema_metadata({"made": MARK})
    pq.write_table(data, sink, row_group_size=-(-rows // ROW_GROUPS))
    return sink.getvalue()


def write_job(folder: Path) -> Path:
    (folder / "in").mkdir()
    job = {
        "input": {"path": str(folder / "in")},
        "prompt": {"column": "text"},
        "model": {"path": "demo:target"},
        "engine": {"device": "cpu"},
        "output": {"path": str(folder / "out")},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML too
    return path


def bench_plan(
    scales: Sequence[int], files: int, rows_per_file: int, parts_per_window: int, repeats: int, folder: str | None
) -> dict[str, Any]:
    """Return the figures of datasets of `files` times each scale, created under `folder` and removed at the end.

    Seconds and bytes are medians. Raises PipelineError when a measuring process fails.
    """
    costs, template = [], parquet_template(rows_per_file)
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    with tempfile.TemporaryDirectory(prefix="bench-plan-", dir=folder) as made:
        job, num_files = write_job(Path(made)), 0
        for scale in sorted(scales):
            progress(f"{scale}x: writing {scale * files:,} files")
            for number in range(num_files, scale * files):
                content = template.replace(MARK, b"number-%012d" % number)
                (Path(made) / "in" / f"shard-{number:07d}.parquet").write_bytes(content)
            num_files, runs = scale * files, []
            for repeat in range(repeats):
                progress(f"{scale}x: planning, executing, verifying, {repeat + 1} of {repeats}")
                run: dict[str, float] = {}
                for stage in AFTER_PLAN:
                    options = ["--measure", str(job), stage, "--parts-per-window", str(parts_per_window)]
                    run |= last_line([sys.executable, "-m", "benchmarks.plan", *options], environment)
                runs.append(run)
            middle = {key: median(run[key] for run in runs) for key in runs[0]}
            middle = {key: value if key.endswith("_s") else int(value) for key, value in middle.items()}
            costs.append({"scale": scale, "files": num_files, **middle})
    return {
        "costs": costs,
        "rows_per_file": rows_per_file,
        "file_bytes": len(template),
        "footer_bytes": int.from_bytes(template[-8:-4], "little"),
        "parts_per_window": parts_per_window,
        "repeats": repeats,
        "machine": machine_facts(),
    }


def to_lines(figures: dict[str, Any]) -> list[str]:
    rows = []
    for c in figures["costs"]:
        spent = [figure for stage in STAGES for figure in (c[f"{stage}_s"], c[f"{stage}_bytes"] / 1e6)]
        rows.append((f"{c['scale']}x", c["files"], c["rows"], c["windows"], c["parts"], *spent))
    columns = " | ".join(f"{stage} s >9.2f | MB >6.1f" for stage in STAGES)
    return [
        "plan: read footers and cut windows. resume: list parts and find the remaining windows. execute: simulated",
        "read tasks and summaries of units. verify: list parts again, and read and sum their footers.",
        f"Files of {figures['rows_per_file']:,} rows in {ROW_GROUPS} row groups and {COLUMNS} columns, footers of "
        f"{figures['footer_bytes']:,} bytes, just written to a local disk (in the page cache).",
        f"{figures['parts_per_window']} parts per window; before resume, nine of ten windows are complete. Medians of "
        f"{figures['repeats']} new processes each; memory: growth to the peak, without imports.",
        facts_to_text(figures["machine"]),
        "",
        *table(f" >5 | files >7, | rows >14, | windows >8, | parts >10, | {columns}", rows),
    ]


@script(__doc__)
@click.option("scales", "--scale", multiple=True, type=click.IntRange(min=1), default=(1, 10, 100), show_default=True,
              metavar="N", help="Multiple of --files. May be repeated.")  # fmt: skip
@click.option("--files", type=click.IntRange(min=1), default=100, show_default=True, help="Files at scale 1.")
@click.option("--rows-per-file", type=click.IntRange(min=ROW_GROUPS), default=100_000, show_default=True)
@click.option("--parts-per-window", type=click.IntRange(min=1), default=60, show_default=True,
              help="60 are a million parts at scale 100; the default unit size gives 128.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Processes per figure.")
@click.option("--folder", metavar="DIR", help="Folder for the files; default: the temporary folder.")
@click.option("--measure", nargs=2, metavar="JOB STAGE", hidden=True, help="Measure one stage in this process.")
@json_flag
def main(measure: tuple[str, str] | None, as_json: bool, **options: Any) -> None:
    if measure is not None:
        print(json.dumps(measure_stage(*measure, options["parts_per_window"])))
        return
    figures = bench_plan(**options)
    report("plan", figures, to_lines(figures), as_json)


if __name__ == "__main__":
    main()
