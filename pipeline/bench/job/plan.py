"""What a large job costs its driver beside the engines: time and memory, at growing sizes.

The dataset is made for it: real Parquet files, each with a footer of its own, whose row groups have as many rows as
those of large files, but one value in each column. The parts are names and footers in memory: the time that a disk or a
store takes to list and read them is not in the figures. Executing is simulated: the summaries of all units, and what
Ray keeps of their blocks, without Ray. Each figure comes from fresh processes (`plan_process`).
"""

import io
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.bench.job.plan_process import DOES
from pipeline.bench.measure import facts_to_text, said_by, table
from pipeline.machine.interpreter import child_environment

ROW_GROUPS = 10
COLUMNS = 8
DONE = ("plan", "resume", "execute", "verify")
_MARK = b"number-000000000000"  # in each footer, replaced so that no two are the same


@dataclass(frozen=True)
class PlanCost:
    """At one size. Memory is what the process grew by at its peak; seconds and bytes are medians."""

    scale: int
    files: int
    rows: int
    windows: int
    parts: int
    plan_s: float
    plan_bytes: int
    resume_s: float
    resume_bytes: int
    execute_s: float
    execute_bytes: int
    verify_s: float
    verify_bytes: int


@dataclass(frozen=True)
class PlanBench:
    costs: tuple[PlanCost, ...]
    rows_per_file: int
    file_bytes: int
    footer_bytes: int
    parts_per_window: int
    repeats: int
    machine: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "plan", **asdict(self)}

    def to_text(self) -> str:
        lines = [
            "Planning: footers of all files read, schemas merged, windows cut, the job's fingerprint made.",
            "Resuming: the names of existing parts are read, and the windows that are left found. No part is opened.",
            "Executing: the driver's part of it, simulated: read tasks, what Ray keeps of blocks, units' summaries.",
            "Verifying: the names are read again, and the footers of all parts are read and summed.",
            f"Files of {self.rows_per_file:,} rows in {ROW_GROUPS} row groups and {COLUMNS} columns, footers of "
            f"{self.footer_bytes:,} bytes, just written on a local disk (in the page cache).",
            f"{self.parts_per_window} parts a window; before resuming, nine of ten windows are complete. Names and "
            "footers are made in memory, so a disk's or a store's own time is not in it.",
            f"Median of {self.repeats} fresh processes each; memory: growth to the peak, imports left out.",
            facts_to_text(self.machine),
            "",
        ]
        rows = []
        for c in self.costs:
            spent = [figure for what in DONE for figure in (vars(c)[f"{what}_s"], vars(c)[f"{what}_bytes"] / 1e6)]
            rows.append((f"{c.scale}x", c.files, c.rows, c.windows, c.parts, *spent))
        columns = " | ".join(f"{what} s >9.2f | MB >6.1f" for what in DONE)
        return "\n".join(lines + table(f" >5 | files >7, | rows >14, | windows >8, | parts >10, | {columns}", rows))


def bench_plan(
    scales: Sequence[int] = (1, 10, 100),
    files: int = 100,
    rows_per_file: int = 100_000,
    parts_per_window: int = 60,
    repeats: int = 1,
    folder: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> PlanBench:
    """Measure datasets of `files` times each scale, made under `folder` (None: the system's temporary folder) and
    removed again. `say` is told what goes on. Raises PipelineError when a measuring process fails."""
    assert min(*scales, files, rows_per_file, parts_per_window, repeats) >= 1
    costs: list[PlanCost] = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-", dir=folder) as made:
        template = _template(rows_per_file)
        job = _job_file(Path(made))
        there = 0
        for scale in sorted(scales):
            say(f"{scale}x: writing {scale * files:,} files")
            for number in range(there, scale * files):
                content = template.replace(_MARK, b"number-%012d" % number)
                (Path(made) / "in" / f"shard-{number:07d}.parquet").write_bytes(content)
            there = scale * files
            runs = []
            for repeat in range(repeats):
                say(f"{scale}x: planning, executing, verifying, {repeat + 1} of {repeats}")
                run: dict[str, float] = {}
                for what in DOES:
                    command = ["-m", "pipeline.bench.job.plan_process", str(job), str(parts_per_window), what]
                    run |= said_by([sys.executable, *command], child_environment())
                runs.append(run)
            middle = {key: median(run[key] for run in runs) for key in runs[0]}
            costs.append(PlanCost(scale, there, **{k: v if k.endswith("_s") else int(v) for k, v in middle.items()}))
    return PlanBench(
        tuple(costs),
        rows_per_file,
        len(template),
        int.from_bytes(template[-8:-4], "little"),
        parts_per_window,
        repeats,
        {
            "cores": str(len(os.sched_getaffinity(0))),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
        },
    )


def _template(rows: int) -> bytes:
    """A Parquet file of `rows` rows and few bytes: each column is one value, so a dictionary and a run."""
    text = pa.scalar("A line of text as it may stand in a report.")
    columns: dict[str, pa.Array] = {"id": pa.repeat(pa.scalar(7, pa.int64()), rows), "text": pa.repeat(text, rows)}
    columns |= {f"number_{i}": pa.repeat(pa.scalar(i + 0.5), rows) for i in range(COLUMNS - len(columns))}
    table = pa.table(columns).replace_schema_metadata({"made": _MARK})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=-(-rows // ROW_GROUPS))
    return sink.getvalue()


def _job_file(folder: Path) -> Path:
    (folder / "in").mkdir()
    path = folder / "job.yaml"
    job = {
        "input": {"path": str(folder / "in")},
        "prompt": {"column": "text"},
        "model": {"path": "demo:target"},
        "engine": {"device": "cpu"},
        "output": {"path": str(folder / "out")},
    }
    path.write_text(json.dumps(job))  # JSON is YAML too
    return path
