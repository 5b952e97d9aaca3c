"""Measurements of earlier runs on this machine, kept in the user's cache for `pipeline plan`: the speed of a model and
the lengths of a job's completions.

Owns `$PIPELINE_CACHE/runs/<model>/<run>.json`, the newest few of each model. It is a cache: missing or unreadable files
only make estimates less certain.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFailed
from pipeline.job.dataflow.spec import ray_address
from pipeline.job.planning.plan import JobPlan
from pipeline.machine.caches import cache_root
from pipeline.machine.host import available_cores, processor
from pipeline.report.record.run_record import RunRecord

MAX_KEPT = 32  # runs per model


@dataclass(frozen=True)
class Remembered:
    """An earlier run. same_work: prompt, sampling and model are the same, so completions have similar lengths;
    otherwise only model and machine are."""

    run: RunRecord
    same_work: bool


def remember(plan: JobPlan, run: RunRecord) -> None:
    """Save a run, if any engine took a step."""
    if not run.stat("num_steps"):
        return
    with suppress(OSError, EnvironmentFailed):
        folder = _folder(plan)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"machine": _machine(plan), "work": _work(plan), "run": run.to_json()}
        name = hashlib.sha256(f"{plan.job.config.output.path} {run.run_id}".encode()).hexdigest()[:16]
        (folder / f".{name}").write_text(json.dumps(record))
        os.replace(folder / f".{name}", folder / f"{name}.json")
        for old in _newest_first(folder)[MAX_KEPT:]:
            old.unlink(missing_ok=True)


def recall(plan: JobPlan) -> list[Remembered]:
    """Return earlier runs of the plan's model and numerics on the same kind of machine and servers, newest first."""
    found = []
    with suppress(OSError, EnvironmentFailed):
        for path in _newest_first(_folder(plan)):
            with suppress(OSError, ValueError, KeyError, TypeError, AssertionError):
                raw = json.loads(path.read_text())
                if raw["machine"] == _machine(plan):
                    found.append(Remembered(RunRecord.from_json(raw["run"]), raw["work"] == _work(plan)))
    return found


def _folder(plan: JobPlan) -> Path:
    identity = plan.fingerprint.identity
    return cache_root() / "runs" / _digest(identity["model"] or identity["server"])  # a server's model has no files


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime_ns)


def _machine(plan: JobPlan) -> str:
    """Return a digest of the settings that determine speed and are known before an engine starts."""
    run, numerics = plan.job.config.run, plan.fingerprint.numerics
    cores = run.cpus_per_actor or max(1, available_cores() // run.pool[1])
    urls = (plan.fingerprint.free.get("server") or {}).get("base_url")
    return _digest([numerics, plan.device, processor()[0], cores, ray_address() is not None, urls])


def _work(plan: JobPlan) -> str:
    identity = plan.fingerprint.identity
    sampling = {name: value for name, value in identity["sampling"].items() if name != "seed"}
    steps = [identity["steps"]] if "steps" in identity else []
    return _digest([identity["prompt"], sampling, identity["engine"], identity["server"], identity["task"], *steps])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
