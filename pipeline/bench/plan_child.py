"""The process that `bench_plan` measures: plans the job of a file, then resumes it from part names in memory.

Prints one JSON object. Memory is the resident set's growth to its peak within each half, as Linux counts it.
"""

import json
import sys
import time
from pathlib import Path

from pipeline.config import load_job
from pipeline.data.folder import LocalFolder
from pipeline.data.parts import PartName, PartStore
from pipeline.job.plan import Plan, make_plan, what_is_left


class _Listed(LocalFolder):
    """A folder whose listing is the parts of a job that was stopped: of every tenth window one unit is missing."""

    def __init__(self, plan: Plan, parts_per_window: int) -> None:
        super().__init__(plan.config.output.path)
        self._plan, self._of, self._rows = plan, parts_per_window, 512

    def names(self, folder: str = "") -> list[str]:
        names = []
        for window in self._plan.windows:
            last = str(PartName(self._plan.fingerprint.short, window.index, self._of - 1, self._of, self._rows))
            head, tail = last.split(f"-u{self._of - 1:04d}")
            names += [f"{head}-u{unit:04d}{tail}" for unit in range(self._of - (window.index % 10 == 0))]
        return names


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


def main(job: str, parts_per_window: int) -> None:
    config = load_job(job)
    began = _begin()
    plan = make_plan(config, "cpu")
    plan_s, plan_bytes = _spent(began)

    store = PartStore(config.output.path)
    store.folder = _Listed(plan, parts_per_window)
    began = _begin()
    progress = store.list(plan.fingerprint.short)
    tasks = what_is_left(plan, progress)
    resume_s, resume_bytes = _spent(began)
    assert len(tasks) == -(-len(plan.windows) // 10), "every tenth window is left"
    found = {
        "rows": plan.num_rows,
        "windows": len(plan.windows),
        "parts": progress.num_units,
        "plan_s": plan_s,
        "plan_bytes": plan_bytes,
        "resume_s": resume_s,
        "resume_bytes": resume_bytes,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
