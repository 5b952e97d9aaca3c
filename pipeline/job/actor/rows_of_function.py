"""Rows of a unit whose requests a function of the user makes (`run_job(row_fn=...)`).

Each row is a task of an event loop, which runs between two messages of the engine until all functions wait. A request
is identified by its prompt and options and by the number of equal ones before it in its row, not by its order. So its
random numbers, and its replay after a stop, do not depend on which of several open requests finishes first.
"""

import asyncio
import hashlib
import json
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.data.units import Unit, one_unit
from pipeline.engine.completion import Completion
from pipeline.engine.final_check import checked
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import RowError
from pipeline.job.actor.resolved_job import PROMPT, ResolvedJob
from pipeline.job.actor.row_function import RequestFailed
from pipeline.job.actor.steps import AnyRequest, RowOfSteps, StepRun
from pipeline.job.actor.tokenize import step_seed
from pipeline.job.actor.work_spec import RowReader

POLL_S = 0.01  # while a function waits for something else than a request
_OPTIONS = {f.name for f in fields(SamplingParams)} - {"n", "seed"}


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that can run until no callback is ready."""

    _num_scheduled = 0

    def call_soon(self, *args: Any, **options: Any) -> asyncio.Handle:
        self._num_scheduled += 1
        return super().call_soon(*args, **options)

    def run_ready(self) -> None:
        """Run the ready callbacks, and those that they schedule, until none schedules another."""
        num_before = -1
        while self._num_scheduled != num_before + 1:
            num_before = self._num_scheduled
            self.call_soon(self.stop)
            self.run_forever()


@dataclass(eq=False)
class _Call:
    """Call of the function for a row. first: the request of the job's own prompt. kept: requests that an earlier run
    finished, not yet replayed. num_made: requests by step. draft: the completion of `first`. outcome: returned values,
    error and message, once the function has ended."""

    index: int
    first: AnyRequest
    kept: dict[tuple[int | str, int], Completion]
    runs: list[StepRun] = field(default_factory=list)
    num_made: Counter[int | str] = field(default_factory=Counter)
    num_open: int = 0
    draft: Completion | None = None
    outcome: tuple[dict[str, Any], str | None, str | None] | None = None


@dataclass(eq=False)
class _Made:
    """Request that a function made. prompt: text, or messages as JSON; None: the job's own prompt."""

    call: _Call
    step: int | str
    attempt: int
    prompt: str | None
    options: dict[str, Any]
    answer: "asyncio.Future[Completion]"


class RowsOfFunction:
    """Rows of one unit on their way through the job's row function. Not thread-safe."""

    def __init__(self, job: ResolvedJob, readers: Sequence[RowReader], unit: Unit, kept: Iterable[Completion]) -> None:
        """readers: of the job's prompts. kept: rows of a stopped run, whose requests are replayed."""
        assert job.row_fn is not None
        self._row_fn, self._readers, self._unit, self._columns = job.row_fn, readers, unit, unit.kept()
        self._seed, self._is_chat, self._spec = job.config.seed, job.prompt.chat is not None, job.prompts[1].units
        self._kept = {row.row_id: row.runs for row in kept if isinstance(row, RowOfSteps)}
        self._calls: dict[int, _Call] = {}  # of rows that have not ended
        self._tasks: list[asyncio.Task[None]] = []  # the loop itself holds no references
        self._made: list[_Made] = []  # not sent yet
        self._open: dict[object, tuple[_Made, SamplingParams]] = {}  # by row_id of the request
        self._ended: list[RowOfSteps] = []
        self._is_closed = False
        self._loop = _Loop()

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    @property
    def poll_s(self) -> float | None:
        return POLL_S if any(call.num_open == 0 for call in self._calls.values()) else None

    def begin(self, requests: Iterable[AnyRequest]) -> list[AnyRequest]:
        """Call the function for rows with these first requests. Return the requests to send."""
        for request in requests:
            assert isinstance(request.row_id, int)
            kept = {(run.step, run.attempt): run.completion for run in self._kept.get(request.row_id, ())}
            call = self._calls[request.row_id] = _Call(request.row_id, request, kept)
            self._tasks.append(self._loop.create_task(self._run(call)))
        return self._continued()

    def follow_up(self, completions: Iterable[Completion]) -> list[AnyRequest]:
        """Record finished requests and continue the functions. Return the requests that they make."""
        for done in completions:
            made, params = self._open.pop(done.row_id)
            self._answer(made, checked(done, params))
        return self._continued()

    def finished(self) -> list[RowOfSteps]:
        """Return the rows that have ended."""
        return self._ended

    def unfinished(self) -> list[RowOfSteps]:
        """End the functions that still run. Return their rows that have finished a request, as far as they came."""
        self._is_closed = True
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_ready()
        self._loop.close()
        runs = {call.index: [*call.runs, *(StepRun(*key, done) for key, done in call.kept.items())]
                for call in self._calls.values()}  # fmt: skip
        return [RowOfSteps.of_runs(index, some) for index, some in runs.items() if some]

    def _continued(self) -> list[AnyRequest]:
        """Run the functions until all wait. Return the requests to send."""
        to_send: list[AnyRequest] = []
        self._loop.run_ready()
        while self._made:
            made, self._made = self._made, []
            to_send += self._requests(made)
            self._loop.run_ready()
        return to_send

    async def _run(self, call: _Call) -> None:
        async def generate(prompt: object = None, /, **options: Any) -> Completion:
            return await self._make(call, prompt, options)

        try:
            row = self._unit.own("_inputs")[call.index].as_py() or {}
            row |= {name: self._columns.column(name)[call.index].as_py() for name in self._columns.column_names}
            call.outcome = self._checked(await self._row_fn.function(row, generate)), None, None
        except BaseException as raised:  # also a cancellation by the function itself: each row must end
            if self._is_closed:
                raise
            call.outcome = {}, *_failure(raised)
        self._end_if_done(call)

    def _make(self, call: _Call, prompt: object, options: dict[str, Any]) -> "asyncio.Future[Completion]":
        """Return the future result of a new request. Raises TypeError and the like, in the function that makes it."""
        if call.outcome is not None or self._is_closed:
            raise RuntimeError("generate: the function of this row has ended")
        if unknown := ", ".join(sorted(options.keys() - _OPTIONS)):
            raise TypeError(f"generate: no option {unknown}; expected fields of SamplingParams, without n and seed")
        if isinstance(prompt, list) and not self._is_chat:
            raise TypeError("generate: messages need prompt.chat in the job file")
        if not isinstance(prompt, str | list | None):
            raise TypeError(f"generate({prompt!r:.80}): expected a text, or a list of messages")
        if isinstance(prompt, str) and self._is_chat:
            prompt = [{"role": "user", "content": prompt}]
        text = json.dumps(prompt) if isinstance(prompt, list) else prompt
        identity = json.dumps([text, options], ensure_ascii=False, sort_keys=True).encode()
        step = 0 if text is None and not options else hashlib.blake2b(identity, digest_size=16).hexdigest()
        made = _Made(call, step, call.num_made[step], text, options, self._loop.create_future())
        call.num_made[step] += 1
        call.num_open += 1
        self._made.append(made)
        return made.answer

    def _requests(self, made: list[_Made]) -> list[AnyRequest]:
        """Return the requests to send, and answer the others: refused ones, and those that an earlier run computed."""
        to_send: list[AnyRequest] = []
        others: tuple[list[_Made], list[_Made]] = [], []  # of the job's own prompt, and of prompts of the function
        for one in made:
            if (done := one.call.kept.pop((one.step, one.attempt), None)) is not None:
                self._answer(one, done)
            elif (one.step, one.attempt) == (0, 0):
                to_send.append(self._sent(one, one.call.first))
            else:
                others[one.prompt is not None].append(one)
        for read, some in zip(self._readers, others, strict=True):
            requests, failed = read(self._unit_of(some)) if some else ((), ())
            for done in failed:
                self._answer(some[done.row_id], done)  # type: ignore[index]
            to_send += [self._sent(some[request.row_id], request) for request in requests]  # type: ignore[index]
        return to_send

    def _unit_of(self, made: list[_Made]) -> Unit:
        """Return requests as a unit: all of the job's own prompt, or all of prompts that the functions made."""
        unit = self._unit.of_rows([one.call.index for one in made])
        adapters, defaults = (unit.own(name).to_pylist() for name in ("_adapter", "_params"))
        params = []
        for one, own, row_id in zip(made, defaults, unit.row_ids(), strict=True):
            seed = step_seed(self._seed, *row_id, str(one.step), one.attempt)
            params.append(json.dumps({**json.loads(own or "{}"), "seed": seed, **one.options}))
        if made[0].prompt is not None:
            prompts = pa.array([one.prompt for one in made], pa.string())
            arrays = [prompts, unit.own("source_file"), unit.own("source_row")]
            unit = one_unit(pa.Table.from_arrays(arrays, [PROMPT, "", ""]), self._spec).with_own("_adapter", adapters)
        return unit.with_own("_params", params)

    def _sent(self, made: _Made, request: AnyRequest) -> AnyRequest:
        row_id = made.call.index, made.step, made.attempt
        self._open[row_id] = made, request.params
        return replace(request, row_id=row_id, is_follow_up=bool(made.call.runs), expects_follow_up=True)

    def _answer(self, made: _Made, done: Completion) -> None:
        """Record a finished request, and pass it to the function."""
        call, done = made.call, replace(done, row_id=made.call.index)
        call.runs.append(StepRun(made.step, made.attempt, done))
        call.num_open -= 1
        if (made.step, made.attempt) == (0, 0) and done.error is None:
            call.draft = done
        if not made.answer.done():  # the function may have cancelled it
            if done.error is None:
                made.answer.set_result(done)
            else:
                made.answer.set_exception(RequestFailed(done))
                made.answer.exception()  # no warning if it is never awaited
        self._end_if_done(call)

    def _end_if_done(self, call: _Call) -> None:
        if call.outcome is not None and not call.num_open:
            values, error, message = call.outcome
            options: dict[str, Any] = {"returned": values, "error": error, "error_message": message}
            self._ended.append(RowOfSteps.of_runs(call.index, call.runs, call.draft, **options))
            del self._calls[call.index]

    def _checked(self, returned: object) -> dict[str, Any]:
        """Return the values of the row's columns. Raises TypeError or ValueError if they do not fit."""
        columns = {column.name: column.type for column in self._row_fn.columns}
        if not isinstance(returned, dict | None):
            raise TypeError(f"row_fn returned {returned!r:.80}, expected a dict or None")
        for name, value in (returned or {}).items():
            if name not in columns:
                raise ValueError(f"row_fn returned {name!r}, which is not in columns ({', '.join(columns) or 'none'})")
            try:
                pa.array([value], columns[name])
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"row_fn returned {value!r:.80} for {name!r}, expected {columns[name]}") from error
        return returned or {}


def _failure(raised: BaseException) -> tuple[str, str]:
    """Return the error code and the message of a row whose function raised."""
    while isinstance(raised, BaseExceptionGroup):  # of a task group
        raised = raised.exceptions[0]
    if isinstance(raised, RequestFailed):
        return str(raised.completion.error), str(raised.completion.error_message)
    message = traceback.format_exception_only(raised)[-1].strip()
    frames = [frame for frame in traceback.extract_tb(raised.__traceback__) if frame.filename != __file__]
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return str(RowError.ROW_FN_FAILED), message + at
