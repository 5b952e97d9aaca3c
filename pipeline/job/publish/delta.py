"""Publication as a Delta table.

The rows are written into files that no reader sees. Then one commit of the table's log adds them, and removes those of
an earlier publication. It fails if another writer has committed since the table was read: the library's own retries are
off. The commit holds application transactions, from which a later call learns what the table holds. They are numbers,
so job and output are identified by the first 60 bits of their digests. A killed call leaves unreferenced files, which
VACUUM deletes.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError, EnvironmentFailed, OutputError, PipelineError
from pipeline.job.publish.card import model_name
from pipeline.job.publish.finished import FinishedOutput
from pipeline.job.publish.publication import Unsettled
from pipeline.stores.filesystem import local_path
from pipeline.stores.redaction import redacted, shown_url

DELTA = "delta:"
EXTRA = "pip install 'parquet-batch-inference[delta]'"
_JOB, _OUTPUT, _ROWS = "pipeline.job", "pipeline.output", "pipeline.rows"  # application ids
_LEFTOVER = re.compile(r"_delta_log|part-\d{5}-[0-9a-f-]{36}-.*\.parquet")  # names of files before the first commit
# types that Delta lacks, with wider ones
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
}


class DeltaDestination:
    """Table `delta:PATH`, at a local path or a url, whose credentials are in the environment. A missing one is
    created."""

    def __init__(self, target: str, *, replace: bool) -> None:
        """replace: overwrite a table, or rows, of other origin. Raises ConfigError without the package deltalake."""
        try:
            import deltalake
        except ImportError:
            raise ConfigError(f"{target}: Delta tables need the package deltalake; install it with {EXTRA}") from None
        self._delta: Any = deltalake
        self.target, self._replace = shown_url(target), replace
        path = target.removeprefix(DELTA)
        local = local_path(path)
        self.path = path if local is None else os.path.abspath(os.path.expanduser(local))
        self._table: Any = None

    def held(self, output: FinishedOutput) -> str | None:
        marks = _marks(output)
        with self._explained():
            self._table = table = self._open()
            if table is None:
                return self._check_unused()
            found = {name: table.transaction_version(name) for name in marks}
            num_rows, version = table.count(), table.version()
        is_unchanged = num_rows == found[_ROWS]  # by other writers
        if found == marks and is_unchanged:
            return f"version {version}"
        if not self._replace and not (found[_JOB] == marks[_JOB] and is_unchanged):
            origin = "another job's output" if found[_JOB] else "rows that no job has published"
            changed = f"{num_rows:,} rows, and this job has published {found[_ROWS] or 0:,}"
            raise OutputError(
                f"{self.target}: holds {changed if found[_JOB] == marks[_JOB] else origin}. With --replace one "
                f"transaction replaces its {num_rows:,} rows by the {output.num_rows:,} of {output.store.path}; its "
                f"version {version} stays readable until VACUUM"
            )
        return None

    def write(self, output: FinishedOutput, log: Callable[[str], None]) -> str:
        table, failed = self._table, list[PipelineError]()
        schema = pa.schema([field.with_type(_WIDER.get(field.type, field.type)) for field in output.schema])
        try:
            self._delta.Schema.from_arrow(schema)
        except Exception as error:  # the library raises the base class
            raise OutputError(f"{self.target}: Delta has no type for a column: {_text(error)}") from error
        batches = pa.RecordBatchReader.from_batches(schema, _batches(output, schema, log, failed))

        def commit() -> None:
            self._delta.write_deltalake(
                self.path if table is None else table,
                batches,
                mode="error" if table is None else "overwrite",
                schema_mode=None if table is None else "overwrite",
                commit_properties=self._properties(output),
            )

        with self._explained():
            try:
                _in_thread(commit)
            except self._delta.exceptions.DeltaError as error:
                if failed:
                    raise failed[0] from None
                is_moved = isinstance(error, self._delta.exceptions.CommitFailedError)
                if is_moved or (table is None and self._open() is not None):
                    raise Unsettled(f"another writer has committed ({_text(error)})") from error
                raise
            return f"version {self._delta.DeltaTable(self.path).version()}"

    def _open(self) -> Any:
        return self._delta.DeltaTable(self.path) if self._delta.DeltaTable.is_deltatable(self.path) else None

    def _check_unused(self) -> None:
        """Raise OutputError if the path of a new table is a file, or a folder with other files than a killed call
        leaves: VACUUM of the table would delete them."""
        if local_path(self.path) is None or not os.path.lexists(self.path):
            return
        foreign = [name for name in os.listdir(self.path) if not _LEFTOVER.fullmatch(name)]
        if foreign:
            raise OutputError(f"{self.target}: is not a Delta table and holds {foreign[0]}; expected a new folder")

    def _properties(self, output: FinishedOutput) -> Any:
        report = output.report
        return self._delta.CommitProperties(
            custom_metadata={
                "pipeline": {
                    "job": report.job,
                    "fingerprint": output.fingerprint,
                    "digest": output.digest,
                    "model": model_name(output.job),
                    "error_rows": report.rows.errors,
                    "prompt_tokens": report.tokens.input,
                    "generated_tokens": report.tokens.generated,
                    "cost_usd": report.cost.total_usd,
                }
            },
            max_commit_retries=0,
            app_transactions=[self._delta.Transaction(name, version) for name, version in _marks(output).items()],
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._delta.exceptions.TableNotFoundError as error:  # the path cannot be a table
            raise OutputError(f"{self.target}: {_text(error)}") from error
        except (self._delta.exceptions.DeltaError, OSError) as error:
            raise EnvironmentFailed(f"{self.target}: {_text(error)}") from error


def _marks(output: FinishedOutput) -> dict[str, int]:
    return {
        _JOB: int(output.fingerprint[:15], 16),
        _OUTPUT: int(output.digest[:15], 16),
        _ROWS: output.num_rows,
    }


def _batches(
    output: FinishedOutput, schema: pa.Schema, log: Callable[[str], None], failed: list[PipelineError]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all parts. The library wraps errors of its input, so they are added to `failed` too."""
    try:
        for name, data in output.read(log):
            table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
            try:
                yield from table.cast(schema).to_batches()
            except (pa.ArrowInvalid, ValueError) as error:
                raise OutputError(f"{output.store.path}: {name} has other columns or types: {error}") from None
    except PipelineError as error:
        failed.append(error)
        raise


def _in_thread(call: Callable[[], None]) -> None:
    """Run in a daemon thread: the main thread must be able to handle signals while the library works."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="delta").start()
    done.result()


def _text(error: Exception) -> str:
    """Return the library's message on one line, without its arrows and the backtrace below it."""
    text = re.split(r"\n\s+0: |\n+stack backtrace", str(error), flags=re.IGNORECASE)[0]
    return redacted(re.sub(r"\s*\x1b\[\d+m↳\x1b\[0m\s*", ": ", text))
