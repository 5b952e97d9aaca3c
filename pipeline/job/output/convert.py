"""`pipeline convert`: the output of a finished job as the files that OpenAI's Batch API would deliver.

A part is read, its rows become lines, the next part is read: memory holds one part. Both files appear whole, the one of
errors first, so that where the other is, nothing is missing; each line follows from the output alone, so the same call
after an interruption makes the same files.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from pipeline.data.output.inventory import read_counts, what_is_wrong
from pipeline.data.output.parts import PartStore
from pipeline.data.output.result_columns import result_names
from pipeline.data.requests.openai_answers import RESULTS, Answered, together
from pipeline.data.requests.request_row import CUSTOM_ID, ENCODING_FORMAT
from pipeline.errors import OutputError
from pipeline.formatting import counted
from pipeline.job.planning.fingerprint import JOB
from pipeline.job.telemetry.run_log import load_runs
from pipeline.stores.new_file import NewFile

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Converted:
    """`errors` is None where no row failed: then there is no file of errors."""

    output: str
    errors: str | None
    completed_rows: int
    error_rows: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        failed = f"; {self.errors}: {counted(self.error_rows, 'error row')}" if self.error_rows else ""
        return f"{self.output}: {counted(self.completed_rows, 'completed row')}{failed}"


def errors_beside(output: str) -> str:
    """Where error rows go when nothing is said: `answers.jsonl` -> `answers.errors.jsonl`."""
    folder, slash, name = output.rpartition("/")
    stem, dot, ending = name.rpartition(".")
    return f"{folder}{slash}{stem}.errors.{ending}" if stem and dot else f"{output}.errors"


def convert(store: PartStore, output: str, errors: str | None, storage: Mapping[str, Any]) -> Converted:
    """Write the lines of completed rows to the file `output`, those of error rows to `errors`, which is made only where
    there are some; None: next to `output`. `storage`: fsspec options of both files, where they are urls.

    Raises OutputError when the job is not finished, its output is not what `_SUCCESS` counts, has no column of
    custom_id, or a file is there already that holds anything else; EnvironmentFailed when a disk or store fails.
    """
    counts = read_counts(store)
    if counts is None:
        raise OutputError(f"{store.path}: no _SUCCESS, so the job is not finished; `pipeline run` it to its end first")
    if (wrong := what_is_wrong(store)) is not None:
        raise OutputError(f"{store.path}: {wrong}; `pipeline verify` names what is damaged")
    if output == errors:
        raise OutputError(f"--errors {errors}: is --output too; give them two names")
    answered = _answered(store)
    done = failed = 0
    with ExitStack() as stack:
        good = stack.enter_context(NewFile(output, storage, "--output"))
        bad = stack.enter_context(NewFile(errors or errors_beside(output), storage, "--errors"))
        for row in _rows(store):
            line = json.dumps(answered.line(row), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            file = good if row["error"] is None else bad
            file.write(line.encode() + b"\n")
            done, failed = done + (row["error"] is None), failed + (row["error"] is not None)
        if (done, failed) != (counts["completed_rows"], counts["error_rows"]):
            raise OutputError(
                f"{store.path}: its parts hold {done:,} completed and {failed:,} error rows, _SUCCESS counts "
                f"{counts['completed_rows']:,} and {counts['error_rows']:,}; `pipeline verify` names what is damaged"
            )
        if failed:
            bad.publish()
        good.publish()
    return Converted(good.shown, bad.shown if failed else None, done, failed)


def _answered(store: PartStore) -> Answered:
    """Return what all lines have in common: from the job's record, and from that of the run that finished it."""
    place = store.folder.shown(JOB)
    try:
        job = json.loads(store.folder.read(JOB) or b"")
        task = job["identity"]["task"]["type"]
        is_chat = job["identity"]["prompt"].get("chat") is not None
        model, fingerprint = str(job["free"]["model"]["path"]), str(job["fingerprint"])
        created = int(datetime.fromisoformat(load_runs(store)[-1].started_at).timestamp())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise OutputError(f"{place}: damaged, or a run's record is missing ({error}); was it edited?") from error
    if task not in ("generate", "embed"):
        raise OutputError(f"{store.path}: its job's task is {task}; only completions and embeddings can be converted")
    endpoint = "embedding" if task == "embed" else "chat" if is_chat else "text"
    return Answered(endpoint, model, created, fingerprint)


def _rows(store: PartStore) -> Iterator[Mapping[str, Any]]:
    """Of each row of the input what its line is made of, in the order of the parts."""

    def choose(schema: pa.Schema) -> list[str]:
        if CUSTOM_ID not in schema.names:
            raise OutputError(
                f"{store.path}: has no column {CUSTOM_ID}, by which an answer is found; its job keeps none "
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
