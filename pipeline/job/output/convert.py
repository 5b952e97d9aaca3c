"""`pipeline convert`: write the output of a finished job as the files of OpenAI's Batch API.

Parts are converted one at a time, so memory holds one part. Both files appear complete, the error file first, so that
the output file's existence means that nothing is missing. Each line depends on the output alone, so the same call after
an interruption writes the same files.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from pipeline.data.output.inventory import finished_counts
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import result_names
from pipeline.data.requests.openai_answers import RESULTS, Answered, together
from pipeline.data.requests.request_row import CUSTOM_ID, ENCODING_FORMAT
from pipeline.errors import OutputError
from pipeline.formatting import counted
from pipeline.job.planning.fingerprint import JOB, read_job
from pipeline.job.telemetry.run_log import load_runs
from pipeline.stores.new_file import CODECS, NewFile

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Converted:
    """Written files. `errors` is None if no row failed: then there is no error file."""

    output: str
    errors: str | None
    completed_rows: int
    error_rows: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        failed = f"; {self.errors}: {counted(self.error_rows, 'error row')}" if self.error_rows else ""
        return f"{self.output}: {counted(self.completed_rows, 'completed row')}{failed}"


def default_errors_path(output: str) -> str:
    """Return the default path for error rows: `answers.jsonl.gz` -> `answers.errors.jsonl.gz`."""
    codec = next((ending for ending in CODECS if output.endswith(ending)), "")
    folder, slash, name = output.removesuffix(codec).rpartition("/")
    stem, dot, ending = name.rpartition(".")
    return f"{folder}{slash}{stem}.errors.{ending}{codec}" if stem and dot else f"{folder}{slash}{name}.errors{codec}"


def convert(store: PartStore, output: str, errors: str | None, storage: Mapping[str, Any]) -> Converted:
    """Write the lines of completed rows to the file `output`, and those of error rows, if any, to `errors` (None: next
    to `output`). `storage`: fsspec options of both files, if they are urls.

    Raises OutputError if the job is not finished, its output does not match `_SUCCESS`, it has no column custom_id, or
    a file with other content already exists; EnvironmentFailed if a disk or store fails.
    """
    counts = finished_counts(store)
    if output == errors:
        raise OutputError(f"--errors {errors}: same file as --output; expected two different files")
    answered = _answered(store)
    done = failed = 0
    with ExitStack() as stack:
        completed_file = stack.enter_context(NewFile(output, storage, "--output"))
        error_file = stack.enter_context(NewFile(errors or default_errors_path(output), storage, "--errors"))
        for row in _rows(store):
            line = json.dumps(answered.line(row), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            file = completed_file if row["error"] is None else error_file
            file.write(line.encode() + b"\n")
            done, failed = done + (row["error"] is None), failed + (row["error"] is not None)
        if (done, failed) != (counts["completed_rows"], counts["error_rows"]):
            raise OutputError(
                f"{store.path}: its parts contain {done:,} completed and {failed:,} error rows, _SUCCESS counts "
                f"{counts['completed_rows']:,} and {counts['error_rows']:,}; `pipeline verify` lists the damage"
            )
        if failed:
            error_file.publish()
        completed_file.publish()
    return Converted(completed_file.shown, error_file.shown if failed else None, done, failed)


def _answered(store: PartStore) -> Answered:
    """Return the values common to all lines: from the job's record and that of the run that finished it."""
    file_name = store.folder.shown(JOB)
    try:
        job = read_job(store) or {}
        task = job["identity"]["task"]["type"]
        conditions = [job["identity"][section].get(key) for section, key in (("input", "when"), ("output", "accept"))]
        is_chat = job["identity"]["prompt"].get("chat") is not None
        model, fingerprint = str(job["free"]["model"]["path"]), str(job["fingerprint"])
        created = int(datetime.fromisoformat(load_runs(store)[-1].started_at).timestamp())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise OutputError(f"{file_name}: damaged, or a run's record is missing ({error}); was it edited?") from error
    if task not in ("generate", "embed"):
        raise OutputError(
            f"{store.path}: the task of its job is {task}; only completions and embeddings can be converted"
        )
    if any(conditions):
        raise OutputError(
            f"{store.path}: its job has input.when or output.accept, and in the files of a batch API each row has an "
            "answer; expected the output of a job without conditions"
        )
    endpoint = "embedding" if task == "embed" else "chat" if is_chat else "text"
    return Answered(endpoint, model, created, fingerprint)


def _rows(store: PartStore) -> Iterator[Mapping[str, Any]]:
    """Yield the data of each input row's line, in the order of the parts."""

    def choose(schema: pa.Schema) -> list[str]:
        if CUSTOM_ID not in schema.names:
            raise OutputError(
                f"{store.path}: has no column {CUSTOM_ID}, which identifies the requests; its job does not keep it "
                "(input.columns)"
            )
        own = [CUSTOM_ID, *([ENCODING_FORMAT] if ENCODING_FORMAT in schema.names else [])]
        return [*own, *(name for kind, name in result_names(schema).items() if kind in RESULTS)]

    for part in store.list().parts():
        table = store.read_part(part, choose).table
        kinds = {name: kind for kind, name in result_names(table.schema).items()}
        table = table.rename_columns([kinds.get(name, name) for name in table.column_names])
        batches = table.to_batches(max_chunksize=_ROWS_AT_ONCE)
        yield from together(row for batch in batches for row in batch.to_pylist())
