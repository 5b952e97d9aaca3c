"""A session from its first stage to its last: started while the budget lasts, packed after each, ended in time."""

import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from pipeline.bench.gpu.device import require_device
from pipeline.bench.gpu.result import read_results, write_whole
from pipeline.bench.gpu.results.report import SessionReport
from pipeline.bench.gpu.session.packing import MAX_BYTES, Pack, pack
from pipeline.bench.gpu.session.plan import Stage
from pipeline.bench.gpu.session.processes import asked_apart, run_side_by_side
from pipeline.bench.gpu.session.triton_cache import FOLDER, drop_listings, unpack_cache
from pipeline.bench.gpu.task import Outcome, Setting, Task
from pipeline.errors import ConfigError, OutputError

RESERVE_S, RESERVE_SHARE = 20.0, 0.05  # of the budget, for the last archives: the smaller
REPORT = "report"
ROOT = Path(__file__).parents[4]  # from which this package is imported

Say = Callable[[str], None]


def run_session(
    stages: Sequence[Stage],
    setting: Setting,
    output: Path,
    budget_s: float,
    *,
    caches: Sequence[Path] = (),
    goes_on: bool = False,
    command: str = "",
    say: Say = lambda text: None,
    max_bytes: int = MAX_BYTES,
) -> SessionReport:
    """Run `stages`, and leave archives and `report.txt` in `output`, at most `packing.MAX_FILES` files of `max_bytes`.

    caches: archives of Triton's cache, of a session before. goes_on: keep what an earlier session left in
    `setting.work`. Raises ConfigError where the device or a cache is not there, OutputError where `output` cannot be
    written.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a card must not touch it
    if why := asked_apart(lambda: _refusal(setting)):
        raise ConfigError(why)
    preload()
    return _Session(stages, setting, output, budget_s, command, say, max_bytes).run(list(caches), goes_on)


def preload() -> None:
    """Import what all sections need: their processes are forked from this one."""
    importlib.import_module("pipeline.engine.engine")
    if find_spec("triton") is not None:
        importlib.import_module("pipeline.kernels.triton.kernel_set")


def _refusal(setting: Setting) -> str:
    try:
        require_device(setting.device, setting.is_smoke)
    except ConfigError as error:
        return str(error)
    return ""


class _Session:
    def __init__(
        self,
        stages: Sequence[Stage],
        setting: Setting,
        output: Path,
        budget_s: float,
        command: str,
        say: Say,
        max_bytes: int,
    ) -> None:
        self._stages, self._setting, self._output, self._budget_s = stages, setting, output, budget_s
        self._command, self._say, self._max_bytes = command, say, max_bytes
        self._began, self._date = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self._work, self._outcomes, self._left_out = Path(setting.work), list[Outcome](), dict[str, list[str]]()

    def run(self, caches: list[Path], goes_on: bool) -> SessionReport:
        self._prepare(goes_on)
        if caches:
            unpack_cache(caches, self._work)
        try:
            for number, stage in enumerate(self._stages):
                self._run_stage(stage, number)
        finally:
            self._pack(with_cache=True)
        report = self._report(complete=True)
        self._write(report)
        return report

    def left_s(self) -> float:
        reserve_s = min(RESERVE_S, RESERVE_SHARE * self._budget_s)
        return self._began + self._budget_s - reserve_s - time.monotonic()

    def _run_stage(self, stage: Stage, number: int) -> None:
        names = ", ".join(task.name for task in stage.tasks[:3]) + (", ..." if len(stage.tasks) > 3 else "")
        if self.left_s() < stage.least_s:
            why = f"{max(self.left_s(), 0):.0f} s of the budget were left, {stage.least_s:.0f} are needed"
            now = time.monotonic() - self._began
            self._outcomes += [Outcome(task.name, "not started", now, 0.0, why) for task in stage.tasks]
            self._tell(f"not started: {names}: {why}")
            return
        self._tell(f"{number + 1} of {len(self._stages)}: {names}")
        ended = run_side_by_side(stage.tasks, self._setting, self._environment(), self.left_s, self._began)
        order = [task.name for task in stage.tasks]
        self._outcomes += sorted(ended, key=lambda outcome: order.index(outcome.name))
        for outcome in ended:
            if outcome.verdict != "done":
                self._tell(f"{outcome.name} {outcome.verdict} after {outcome.seconds:.0f} s: {outcome.why}")
        self._pack(with_cache=stage.packs_cache)

    def _prepare(self, goes_on: bool) -> None:
        try:
            for folder in (self._setting.results, self._setting.traces):
                if not goes_on:
                    shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            (self._work / FOLDER).mkdir(exist_ok=True)
            self._output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"--output {self._output}, --work {self._work}: cannot be written ({error})") from None

    def _environment(self) -> dict[str, str]:
        """Of the sections' processes, beside this one's; PYTHONPATH is for processes that they start anew."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(self._work / FOLDER)}

    def _pack(self, with_cache: bool) -> None:
        report = self._report()
        self._write(report)
        packs = [Pack("results", self._setting.results, 2), Pack("traces", self._setting.traces, 2)]
        if with_cache:
            drop_listings(self._work / FOLDER)
            packs.append(Pack(FOLDER, self._work / FOLDER, 3))
        try:
            for each in packs:
                self._left_out[each.stem] = pack(each, self._output, self._max_bytes)
        except OSError as error:
            raise OutputError(f"--output {self._output}: cannot be written ({error})") from None

    def _report(self, complete: bool = False) -> SessionReport:
        tasks: list[Task] = [task for stage in self._stages for task in stage.tasks]
        return SessionReport(
            self._date,
            self._command,
            self._budget_s,
            self._setting.device != "cpu",
            tuple(tasks),
            tuple(self._outcomes),
            read_results(self._setting.results),
            tuple(path for of_pack in self._left_out.values() for path in of_pack),
            complete,
        )

    def _write(self, report: SessionReport) -> None:
        write_whole(self._setting.results / f"{REPORT}.json", json.dumps(report.to_json(), allow_nan=False))
        write_whole(self._output / f"{REPORT}.txt", report.to_text() + "\n")

    def _tell(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._began:4.0f} s] {text}")
