"""Read an output folder: the progress of its job, whether its run is alive, and its cost.

Reads for display only; nothing here changes the folder.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import load_job
from pipeline.data.columns import did_you_mean
from pipeline.data.output.inventory import output_problem
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import SAMPLE_FIELD, result_field, result_names
from pipeline.errors import ConfigError, OutputError
from pipeline.formatting import duration
from pipeline.job.planning.fingerprint import JOB, read_job, undated_digest
from pipeline.job.telemetry.run_log import REPORT_JSON, STATUS, load_estimate, load_runs, silent_s
from pipeline.job.telemetry.status import Status
from pipeline.machine.liveness import LAST_STATUS_S, STATUS_SILENT_S
from pipeline.report.build import build_report
from pipeline.report.by_column import COUNTED, ByColumn, by_column
from pipeline.report.record.json_record import SCHEMA_VERSION
from pipeline.report.record.run_record import RunRecord
from pipeline.report.run_report import RunReport
from pipeline.stores.filesystem import is_url, storage_for


def open_output(target: str, vars: Iterable[str] = ()) -> PartStore:
    """Open the output at `target`: a folder, an fsspec url, or the output of a job file with `vars`. Raises
    OutputError, also for an output of another format, and ConfigError."""
    path, storage = output_of(target, vars)
    if not is_url(path) and target == path and not Path(path).is_dir():
        problem = "is neither an output folder nor a job file (.yaml)" if Path(path).exists() else "no such folder"
        raise OutputError(f"{target}: {problem}")
    store = PartStore(path, storage_for(path, storage))
    read_job(store)  # refuses the output of another version
    return store


def output_of(target: str, vars: Iterable[str] = ()) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """Return the path of an output and its job's fsspec options by url prefix: `target` itself without options, or the
    values of the job file."""
    path = Path(target)
    if is_url(target) or path.suffix not in (".yaml", ".yml") or path.is_dir():
        if given := list(vars):
            raise ConfigError(f"--var {given[0]}: {target} is not a job file, and only job files have variables")
        return target, {}
    job = load_job(path, vars=vars)
    return job.output.path, job.storage_options


def status_of(store: PartStore) -> Status:
    """Return the last status that a run wrote."""
    raw = _read(store, STATUS, "no status of a job's run here")
    try:
        return Status.from_json(raw)
    except TypeError as error:
        raise OutputError(f"{store.path}/{STATUS}: not written by this version ({error})") from None


def staleness(store: PartStore, now: Status, run: RunRecord | None) -> str | None:
    """Return why a status is stale, in one line, or None. A `running` status is stale if its process on this machine is
    missing, its record has ended, or it was not updated for long; a `finished` one if the parts have changed. `run`:
    the record of the status's run."""
    if now.outcome == "finished":
        return damage_of(store)
    if now.outcome != "running":
        return None
    if run is not None and run.outcome == "killed":
        pid = run.versions.get("pid", "unknown")
        return f"Its process, {pid} on this machine, is no longer running. `pipeline run` resumes it."
    silent_for_s = silent_s(now)
    if run is not None and run.outcome != "running" and silent_for_s >= LAST_STATUS_S:
        return (
            f"The run's record is {run.outcome}; its last status could not be written, as on a full disk. "
            "`pipeline run` resumes it."
        )
    if silent_for_s < STATUS_SILENT_S:
        return None
    host = run.versions.get("host", "unknown") if run is not None else "unknown"
    return (
        f"No status for {duration(round(silent_for_s))}. If its process on {host} has ended, `pipeline run` resumes it."
    )


def damage_of(store: PartStore) -> str | None:
    """Return how a finished output is damaged and what to do, from one listing; None if it looks intact."""
    damage = output_problem(store)
    if damage is None:
        return None
    return (
        f"The output changed after the job finished: {damage}. `pipeline verify` lists the damage; `pipeline run` "
        "recomputes missing parts."
    )


def report_of(store: PartStore) -> RunReport:
    """Return the report over all runs: the folder's, or a new one if a run is in progress or was killed since."""
    runs = load_runs(store)
    if not runs:
        raise OutputError(f"{store.path}: no record of a job's run here")
    try:
        if store.folder.read(REPORT_JSON) is not None:
            kept = RunReport.from_json(_read(store, REPORT_JSON, ""))
            if list(kept.runs) == runs and kept.schema_version == SCHEMA_VERSION:
                return kept
        job = read_job(store)
        if job is None:
            raise OutputError(f"{store.path}: the job's own record, {JOB}, is missing")
        rows = _read(store, STATUS, "the job's status, _pipeline/status.json, is missing")["rows_total"]
        estimate = load_estimate(store, undated_digest(job["identity"]))
        return build_report(job["job"], job["fingerprint"], runs, store.totals(), rows, estimate)
    except (KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"{store.path}/_pipeline: not written by this version ({error!r})") from None


def divided_by(store: PartStore, report: RunReport, column: str, most: int) -> ByColumn:
    """Divide the report's machine time by the values of a column of the output. Raises ConfigError for a missing
    column, or one of lists or structs."""

    def choose(schema: pa.Schema) -> list[str]:
        if column not in schema.names:
            raise ConfigError(f"--by {column}: the output has no such column{did_you_mean(column, schema.names)}")
        if pa.types.is_nested(schema.field(column).type):
            raise ConfigError(f"--by {column}: is {schema.field(column).type}; expected a column of single values")
        samples = result_names(schema).get(SAMPLE_FIELD.name)
        found = [column, *(result_field(schema, name).name for name in COUNTED), *([samples] if samples else [])]
        return list(dict.fromkeys(found))

    with closing(store.tables(choose)) as tables:
        return by_column(report, column, tables, most)


def _read(store: PartStore, name: str, absent: str) -> dict[str, Any]:
    data = store.folder.read(name)
    if data is None:
        raise OutputError(f"{store.path}: {absent}")
    try:
        raw = json.loads(data)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise OutputError(f"{store.path}/{name}: not one JSON object; was it edited?")
    return raw
