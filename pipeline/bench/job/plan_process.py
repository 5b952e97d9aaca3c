"""The process that `bench_plan` measures: plans the job of a file, then does one of the things a driver does.

`resume` reads part names, `execute` takes the summaries of all units, `verify` counts the parts by their footers. The
parts are names and footers made in memory. Prints one JSON object. Memory is the resident set's growth to its peak
within each, as Linux counts it.
"""

import json
import pickle
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from pipeline.config import load_job
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore, serialize
from pipeline.data.source import Window, narrowed
from pipeline.job.output.success import verify
from pipeline.job.planning.plan import JobPlan, make_plan, what_is_left
from pipeline.job.telemetry.run_log import RunLog
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.job.telemetry.writer import Telemetry
from pipeline.report.record.row_stats import LengthBucket, RowStats, Timing, latency_of
from pipeline.stores.local_folder import LocalFolder
from pipeline.stores.retries import RetryCounts

UNITS_A_STEP = 10  # units that Ray's executor hands on, at most, before it drops statistics of blocks again


class _Listed(LocalFolder):
    """A folder of the parts of a job. `stopped`: of every tenth window one unit is missing."""

    def __init__(self, plan: JobPlan, parts_per_window: int, stopped: bool) -> None:
        super().__init__(plan.job.config.output.path)
        self._plan, self._of, self._stopped = plan, parts_per_window, stopped
        self._part = cache(lambda rows: serialize(_rows(plan.schema, rows), {"pipeline.job": "x" * 2000}))

    def each_name(self) -> Iterator[str]:
        short, of = self._plan.fingerprint.short, self._of
        for window in self._plan.windows:
            last = str(PartName(short, window.index, of - 1, of, 0))
            head = last.split(f"-u{of - 1:04d}")[0]
            for unit in range(of - (self._stopped and window.index % 10 == 0)):
                yield f"{head}-u{unit:04d}of{of:04d}-n{_share(window, unit, of)}.parquet"

    def tail(self, name: str, length: int) -> bytes:
        return self._part(int(name.rpartition("-n")[2].removesuffix(".parquet")))[-length:]


def _share(window: Window, unit: int, of: int) -> int:
    return window.num_rows // of + (unit < window.num_rows % of)


def _rows(schema: pa.Schema, rows: int) -> pa.Table:
    return pa.table([pa.nulls(rows, field.type) for field in schema], schema=schema)


def _resume(plan: JobPlan, store: PartStore, parts_per_window: int) -> None:
    store.folder = _Listed(plan, parts_per_window, stopped=True)
    tasks = what_is_left(plan, store.list(plan.fingerprint.short))
    assert len(tasks) == -(-len(plan.windows) // 10), "every tenth window is left"


def _execute(plan: JobPlan, store: PartStore, parts_per_window: int) -> list[bytes]:
    """What the driver holds and does while all units are computed: a read task for each window, Ray's statistics of
    each block of its two operators, and the units' summaries."""
    tasks = [pickle.dumps(needed) for needed in narrowed(plan.source, plan.windows)]
    after_step, operators = _ray_operators()
    log = RunLog(store, {}, None, {}, Telemetry(store.folder), RetryCounts())
    latency = latency_of([Timing(0, 100_000 + 5000 * i, 2_000_000 + 9000 * i, 100) for i in range(512)])
    rows = RowStats(latency, {500: LengthBucket(512, 512 * 500, 0, 512 * 100)})
    summary = UnitSummary(0, 0, PartTotals(512, 1, {}, 512 * 500, 0, 512 * 100), True, rows)
    text = json.dumps(summary.to_json())
    for unit in range(len(plan.windows) * parts_per_window):
        for operator in operators:
            operator._output_blocks_stats.append(_block_stats(unit))
        if unit % UNITS_A_STEP == 0:
            after_step()
        log.add(UnitSummary.from_json(json.loads(text)))
    assert log.written.units == len(plan.windows) * parts_per_window
    return tasks


def _ray_operators() -> tuple[Any, list[Any]]:
    """What the job has Ray do after each step of its executor, and stand-ins for the operators it does that to."""
    from ray.data import DataContext

    from pipeline.job.dataflow.block_stats import forget_blocks

    operators = [SimpleNamespace(_output_blocks_stats=[]) for _ in ("read", "compute")]
    forget_blocks(context := DataContext())
    callbacks = [callback() for callback in context.custom_execution_callback_classes]

    def after_step() -> None:
        for callback in callbacks:
            callback.on_execution_step(SimpleNamespace(_topology=operators))  # type: ignore[arg-type]

    return after_step, operators


def _block_stats(unit: int) -> Any:
    from ray.data.block import BlockExecStats, BlockStats, TaskExecWorkerStats

    return BlockStats(1, 1000 + unit, BlockExecStats(task_idx=unit, node_id="x"), TaskExecWorkerStats(float(unit)))


def _verify(plan: JobPlan, store: PartStore, parts_per_window: int) -> None:
    store.folder = _Listed(plan, parts_per_window, stopped=False)
    assert verify(plan, store).units == len(plan.windows) * parts_per_window


def _memory() -> dict[str, int]:
    """Bytes of this process by their names in /proc: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _begin() -> tuple[float, int]:
    """The time, and the memory held; from here the peak counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return time.perf_counter(), _memory()["VmRSS"]


def _spent(began: tuple[float, int]) -> tuple[float, int]:
    return time.perf_counter() - began[0], max(0, _memory()["VmHWM"] - began[1])


DOES = {"resume": _resume, "execute": _execute, "verify": _verify}


def main(job: str, parts_per_window: int, what: str) -> None:
    config = load_job(job)
    began = _begin()
    plan = make_plan(config, "cpu")
    plan_s, plan_bytes = _spent(began)

    if what == "execute":
        _ray_operators()  # imports, which are left out
    began = _begin()
    DOES[what](plan, PartStore(config.output.path), parts_per_window)
    seconds, memory = _spent(began)
    found = {"plan_s": plan_s, "plan_bytes": plan_bytes} if what == "resume" else {}
    found |= {f"{what}_s": seconds, f"{what}_bytes": memory}
    counts = {"rows": plan.num_rows, "windows": len(plan.windows), "parts": len(plan.windows) * parts_per_window}
    print(json.dumps(counts | found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
