"""`--redo`: batches of cut or invalid rows that are computed again under other limits.

A batch is a record, `_pipeline/redo/0001.json`, created before any of its rows is computed; `0001.done.json` is created
when all are. In between, parts with old and new results are mixed, so only a run with the same values completes the
output.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from pipeline.data.output.parts import PartStore
from pipeline.errors import ConfigError, EnvironmentFailed, FingerprintError
from pipeline.job.actor.rows_again import Kind, RowsAgain
from pipeline.job.planning.fingerprint import LIMIT, MAX_TOKENS, with_limits_of
from pipeline.job.planning.plan import JobPlan

FOLDER = "_pipeline/redo"
FORMAT = 1
_DONE = ".done.json"


def with_rows_again(plan: JobPlan, store: PartStore, retry_failed: bool, redo: Sequence[Kind]) -> JobPlan:
    """Return the plan for a run that computes rows again. Its limits may differ from the job's, by which windows stay
    cut. Raises ConfigError for limits that cannot apply, OutputError."""
    if retry_failed:
        ours, limits = with_limits_of(store, plan.fingerprint, (LIMIT,))
        return replace(plan, fingerprint=ours, again=RowsAgain(("failed",), limits))
    if plan.job.task is not None:
        raise ConfigError(f"--redo: is for completions; the task of this job is {plan.job.config.task.type}")
    ours, limits = with_limits_of(store, plan.fingerprint, (LIMIT, MAX_TOKENS))
    plan = replace(plan, fingerprint=ours, again=RowsAgain(tuple(redo), limits))
    if not limits:
        raise ConfigError(
            f"--redo {','.join(redo)}: expected another limit than that of the output's first run, since the same one "
            f"gives the same results: --set {MAX_TOKENS}=N or --set {LIMIT}=N"
        )
    if MAX_TOKENS not in limits:
        return plan
    old, new = ours.identity["sampling"]["max_tokens"], limits[MAX_TOKENS]
    if not isinstance(old, int) or not isinstance(new, int):
        raise ConfigError(f"{MAX_TOKENS}: rows have their own values, from a column, so --redo can only change {LIMIT}")
    if new <= old:
        raise ConfigError(f"{MAX_TOKENS} {new}: with --redo expected more than the job's {old}, by which rows were cut")
    return replace(plan, job=replace(plan.job, units=replace(plan.job.units, default_max_tokens=old)))


def unfinished(store: PartStore) -> RowsAgain | None:
    """Return the batch that was begun and not finished, if any. Raises OutputError if its record is damaged."""
    names = store.folder.names(FOLDER)
    begun = sorted(name for name in names if not name.endswith(_DONE))
    if not begun or begun[-1].replace(".json", _DONE) in names:
        return None
    return store.read_record(
        f"{FOLDER}/{begun[-1]}", FORMAT, lambda record: RowsAgain(tuple(record["kinds"]), dict(record["limits"]))
    )


def check_same(store: PartStore, again: RowsAgain) -> RowsAgain | None:
    """Return the unfinished batch. Raises FingerprintError if there is one of other kinds or limits than `again`."""
    begun = unfinished(store)
    if begun is not None and (set(begun.kinds), begun.limits) != (set(again.kinds), again.limits):
        sets = " ".join(f"--set {key}={json.dumps(value)}" for key, value in begun.limits.items())
        raise FingerprintError(
            f"output.path {store.path}: --redo {','.join(begun.kinds)} with {sets.replace('--set ', '')} was begun and "
            f"is not finished, so parts of both limits are mixed. Finish it with the same values first: pipeline run "
            f"JOB.yaml --redo {','.join(begun.kinds)} {sets}"
        )
    return begun


def begin(store: PartStore, again: RowsAgain, versions: Mapping[str, str], now: datetime) -> None:
    """Record a new batch. Raises EnvironmentFailed if another run recorded one first."""
    number = sum(not name.endswith(_DONE) for name in store.folder.names(FOLDER)) + 1
    body: dict[str, Any] = {"format": FORMAT, "kinds": list(again.kinds), "limits": dict(again.limits)}
    path = f"{FOLDER}/{number:04d}.json"
    if not store.folder.create(path, json.dumps({**body, "at": now.isoformat(), "versions": dict(versions)}).encode()):
        raise EnvironmentFailed(f"{store.folder.shown(path)}: another run has begun a redo of this output; run again")


def finish(store: PartStore, run_id: str) -> None:
    """Record that the last batch is finished."""
    number = sum(not name.endswith(_DONE) for name in store.folder.names(FOLDER))
    store.folder.create(f"{FOLDER}/{number:04d}{_DONE}", json.dumps({"format": FORMAT, "run": run_id}).encode())
