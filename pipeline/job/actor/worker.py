"""Process units in one engine actor, and keep the actor's record. Does not import Ray.

unit -> `RowReader` -> requests -> the engine's process (`process/supervisor`) -> completions -> `write` -> its part

Several units are processed at once, each in its own thread, so that the engine computes one unit's rows while another
is tokenized or written.
"""

import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartStore
from pipeline.data.units import Unit
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.final_check import checked
from pipeline.engine.request import Request
from pipeline.errors import OutputError, PipelineError, RowError
from pipeline.job.actor.byte_room import ByteRoom
from pipeline.job.actor.copies import copied, first_equal_rows
from pipeline.job.actor.partial import PartialUnits
from pipeline.job.actor.resolved_numerics import agree
from pipeline.job.actor.rows_of_function import RowsOfFunction
from pipeline.job.actor.steps import RowsOfSteps
from pipeline.job.actor.work_spec import WorkSpec
from pipeline.job.actor.write import PartWriter, row_stats
from pipeline.job.process.supervisor import Supervisor, computed
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.logs import LogFolder, engine_log
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import ActorRecord
from pipeline.stores.filesystem import storage_for
from pipeline.stores.retries import RetryCounts

MAX_IMAGE_BYTES = 128 << 20  # of open units, in this process and again in the engine's


class Worker:
    """Worker of one actor. Thread-safe. `process` handles a unit completely; the other methods serve reports."""

    def __init__(self, spec: WorkSpec, actor: int, birth_us: int) -> None:
        self._lock = threading.Lock()
        self._record = ActorRecord(actor)  # results of units; `state` adds the supervisor's values
        self._num_reports = 0
        self._retries = RetryCounts()  # this actor's retried storage requests
        config = spec.job.config
        storage = storage_for(spec.output, config.storage_options)
        store = self._store = PartStore(spec.output, storage, self._retries)
        launch, make_readers = spec.backend.open(spec, self._retries)
        logs = LogFolder(store, spec.run_id)
        self._log = logs.log(engine_log(actor), spec.log_level)
        self._supervisor = Supervisor(
            launch, birth_us, self._log, logs.shown(engine_log(actor)), check=partial(agree, store)
        )
        self._readers = make_readers()
        self._read = self._readers[0]
        self._job = spec.job
        self._image_room = ByteRoom(MAX_IMAGE_BYTES)
        self._extra_body = spec.engine.extra_body if isinstance(spec.engine, EndpointConfig) else {}
        greedy = (
            step.task is not None or self._extra_body.get("temperature", step.params.temperature) == 0
            for step in spec.job.steps
        )
        self._copies_rows = config.run.copy_equal_rows and spec.job.row_fn is None and all(greedy)
        self._again, self._sample, self._run_id = spec.again, spec.sample, spec.run_id
        self._partial = PartialUnits(store, spec.fingerprint, self.note)
        self._resumed_rows = 0  # of open units: finished by an earlier run
        self._saved_rows = 0
        self._write = PartWriter(
            store,
            fingerprint=spec.fingerprint,
            rename=config.output.rename,
            results=spec.job.results,
            metadata=spec.metadata,
            kept_types=spec.kept_types,
            limits=spec.again.limits,
            task=spec.job.task,
            accept=config.output.condition,
        )

    def process(self, data: bytes) -> UnitSummary | None:
        """Read, compute and write a unit. A failure of the system is returned in the summary, as type and message.

        Return None after `drain` or `interrupt` if the unit is unfinished: its finished rows are saved for the next
        run.
        """
        unit = Unit.from_bytes(data)
        self._add(units_in_progress=1)
        began = time.monotonic()
        self._log.line(f"unit {unit.index} of window {unit.window}: {unit.num_rows:,} rows", "debug")
        try:
            with self._image_room.holding(unit.image_bytes):
                summary = self._process(unit)
        except PipelineError as error:
            return UnitSummary(unit.window, unit.index, failure_kind=type(error).__name__, failure_message=str(error))
        except Exception:
            return UnitSummary(unit.window, unit.index, failure_kind="", failure_message=traceback.format_exc())
        finally:
            self._add(units_in_progress=-1)
            self._log.line(f"unit {unit.index} of window {unit.window}: {time.monotonic() - began:.1f} s", "debug")
        if summary is not None and not summary.sampled_rows:
            self._add(units=1, rows=summary.totals.rows, error_rows=summary.totals.num_error_rows)
        return summary

    def _add(self, **counts: Any) -> None:
        """Add to counters of the record."""
        with self._lock:
            sums = {name: getattr(self._record, name) + count for name, count in counts.items()}
            self._record = replace(self._record, **sums)

    def _process(self, unit: Unit) -> UnitSummary | None:
        # Ray may retry a task that already wrote the part.
        if self._store.folder.has(str(self._write.name(unit))):
            return self._existing(unit)
        if self._again.limits:  # else the whole unit would be computed under them
            name = self._store.folder.shown(str(self._write.name(unit)))
            raise OutputError(f"{name}: was removed since the run began; first run again without the changed limits")
        requests, failed = self._read(unit)
        wanted = {request.row_id for request in requests}
        # rows of a stopped run, except those that cannot be read any more
        kept = [completion for completion in self._partial.load(unit) if completion.row_id in wanted]
        done, copies, unfinished = self._complete(unit, requests, kept)
        rows = done + copies
        if self._sample or len(rows) < len(requests):
            if done + unfinished:
                self._partial.save(unit, done + unfinished)
                with self._lock:
                    self._saved_rows += len(done)
                self._add(kept_tokens=_new_tokens(done + unfinished, kept))
            if len(rows) == len(requests):
                return self._sampled(unit, failed + rows)
            self._supervisor.raise_failure()
            return None
        summary = self._write(unit, failed + rows)
        stats = replace(summary.row_stats, control_tokens=self._read.control_tokens(unit))
        summary = replace(summary, row_stats=stats)
        if kept:
            self._partial.remove(unit)
        self._count(summary, kept, done)
        return summary

    def _complete(
        self, unit: Unit, requests: Sequence[Request | EndpointRequest], kept: list[Completion]
    ) -> tuple[list[Completion], list[Completion], list[Completion]]:
        """Return the finished completions, with those of `kept`, their copies for equal rows, and with steps what is
        known of rows that have begun. An error is not copied: the rows equal to its row are computed too."""
        first = first_equal_rows(unit, requests, self._extra_body) if self._copies_rows else {}
        known = {completion.row_id for completion in kept}
        wanted = [r for r in requests if r.row_id in known or r.row_id not in first]
        finished, unfinished = self._generate(unit, wanted, kept)
        done = {completion.row_id: completion for completion in finished}
        errors = {completion.row_id for completion in finished if completion.error is not None}
        again = [r for r in requests if r.row_id not in known and first.get(r.row_id) in errors]
        after, unfinished_after = self._generate(unit, again, [])
        done |= {completion.row_id: completion for completion in after}
        copies = [
            copied(done[earlier], row_id)
            for row_id, earlier in first.items()
            if row_id not in done and earlier in done and earlier not in errors
        ]
        return finished + after, copies, unfinished + unfinished_after

    def _generate(
        self, unit: Unit, requests: Sequence[Request | EndpointRequest], kept: list[Completion]
    ) -> tuple[list[Completion], list[Completion]]:
        """Return the completions of `requests` after their final check, which runs here to save engine time, and what
        is known of rows between two steps. kept: results of an earlier run for some of them."""
        if self._job.steps or self._job.row_fn is not None:
            kind = RowsOfSteps if self._job.row_fn is None else RowsOfFunction
            rows = kind(self._job, self._readers, unit, kept)
            self._supervisor.generate_steps(rows.begin(requests), rows)
            return list(rows.finished()), list(rows.unfinished())
        known = {completion.row_id for completion in kept}
        params = {request.row_id: request.params for request in requests}
        with self._resuming(len(kept)):
            generated = self._supervisor.generate([r for r in requests if r.row_id not in known])
        return kept + [checked(done, params[done.row_id]) for done in generated], []

    @contextmanager
    def _resuming(self, num_rows: int) -> Iterator[None]:
        """Count rows of an earlier run as finished while the rest of their unit is computed."""
        with self._lock:
            self._resumed_rows += num_rows
        try:
            yield
        finally:
            with self._lock:
                self._resumed_rows -= num_rows

    def _sampled(self, unit: Unit, completions: list[Completion]) -> UnitSummary:
        errors = {done.row_id for done in completions if done.error == RowError.INVALID_MESSAGES}
        prompts = [
            self._read.shown(text) if text is not None and i not in errors else text
            for i, text in enumerate(unit.own("_prompt").to_pylist())
        ]
        self._write.sample(unit, completions, self._run_id, prompts)
        return UnitSummary(unit.window, unit.index, row_stats=row_stats(unit, completions), sampled_rows=unit.num_rows)

    def _existing(self, unit: Unit) -> UnitSummary | None:
        """Handle a unit whose part exists: compute the rows that the run computes again and replace the part, or do
        nothing."""
        name = self._write.name(unit)
        part = self._store.read_part(name)
        totals = PartTotals.of_table(part.table)
        self._store.check_unit(name, totals, unit.num_rows, unit.rows_checksum())
        again = self._again.of_unit(unit, part)
        if again.num_rows == 0:
            return UnitSummary(unit.window, unit.index, totals, found=True)
        requests, failed = self._read(again)
        done, copies, _ = self._complete(again, requests, [])
        if len(done) + len(copies) < len(requests):
            self._supervisor.raise_failure()
            return None
        summary = self._write.again(again, failed + done + copies, name, part)
        self._count(summary, [], done)
        return summary

    def _count(self, summary: UnitSummary, kept: list[Completion], done: list[Completion]) -> None:
        """Count the work for a unit's rows `done`. kept: of these, what comes from an earlier run."""
        if summary.written:
            self._add(
                delivered_tokens=_new_tokens(done, kept),
                resumed_rows=len(kept),
                resumed_generated_tokens=computed(kept).generated,
            )

    def drain(self) -> None:
        """Begin no more rows; `process` returns when those that run have finished."""
        self._supervisor.drain()

    def interrupt(self) -> None:
        """Stop open units midway and end the engine; `process` returns soon."""
        self._supervisor.interrupt()

    def grant(self, usd: float) -> None:
        """Allow requests to a server up to this cost in US dollars."""
        self._supervisor.grant(usd)

    def state(self) -> ActorState:
        with self._lock:
            self._num_reports += 1
            deaths = self._supervisor.deaths()
            record = replace(
                self._record,
                phases_us=self._supervisor.phases(),
                stats=self._supervisor.stats(),
                restarts=deaths.count,
                restart_reasons=list(deaths.reasons),
                restart_us=deaths.restart_us,
                crashed_tokens=deaths.lost,
                crashed_us=deaths.crashed_us,
                tail_us=self._supervisor.tail_us(),
                storage_retries=self._retries.counted(),
            )
            return ActorState(
                record,
                self._supervisor.open_rows_done() + self._resumed_rows,
                saved_rows=self._saved_rows,
                at_rest=self._supervisor.at_rest(),
                resolved=self._supervisor.resolved,
                loading=self._supervisor.loading,
                waits_for=self._supervisor.waits_for,
                report_number=self._num_reports,
            )

    def note(self, text: str) -> None:
        """Add a line to the actor's log."""
        self._log.line(text)

    def close(self) -> None:
        self._supervisor.close()
        self._log.close()


def _new_tokens(rows: list[Completion], kept: list[Completion]) -> Computed:
    """Return the tokens that this actor computed for rows. kept: of these, what comes from an earlier run."""
    failed = {row.row_id for row in rows if row.error is not None} if kept else set()
    return computed(rows).less(computed(row for row in kept if row.row_id not in failed))
