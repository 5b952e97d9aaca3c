"""Steps of a row: requests that follow from the answers of the row's earlier requests.

The rows of a unit pass their steps independently of each other. As soon as a request of a row has finished, its next
one is made and sent, before requests of rows that wait, so that the row's prompt is still in the prefix cache. A row
ends after its last step, or with the first error. Its result has the columns of all its steps.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.config.sections.steps import DRAFT
from pipeline.data.conditions import Condition
from pipeline.data.units import Unit, one_unit
from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.final_check import checked
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.job.actor.resolved_job import ResolvedJob, ResolvedStep
from pipeline.job.actor.tokenize import step_seed
from pipeline.job.actor.work_spec import RowReader

AnyRequest = Request | EndpointRequest


class RunId(NamedTuple):
    """Identity of a request of a unit. row: index in the unit. step: index among the job's prompts, 0 is the first.
    attempt: number of earlier requests of the row for this step."""

    row: int
    step: int
    attempt: int


@dataclass(frozen=True)
class StepRun:
    """Finished request of a row. step: as in `RunId`, or with a row function a digest of the prompt."""

    step: int | str
    attempt: int
    completion: Completion


@dataclass(frozen=True)
class RowOfSteps(Completion):
    """Result of a row with several requests. Tokens and times are those of all of them, the other fields those of the
    draft. runs: its finished requests in order. columns: values of all steps' columns. returned: values of a row
    function. draft: the latest text; None without one."""

    runs: tuple[StepRun, ...] = ()
    columns: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    returned: Mapping[str, Any] = field(default_factory=dict)
    draft: str | None = None

    @classmethod
    def of_runs(
        cls,
        row_id: object,
        runs: Sequence[StepRun],
        draft: Completion | None = None,
        columns: Mapping[str, dict[str, Any] | None] | None = None,
        *,
        returned: Mapping[str, Any] | None = None,
        error: str | None = None,
        error_message: str | None = None,
    ) -> "RowOfSteps":
        """Sum up the requests of a row. error, error_message: of the row. Without an error, those of its requests that
        failed count as lost."""
        done = [run.completion for run in runs]
        counted = [one for one in done if error is not None or one.error is None]
        lost = _computed(done if error is not None else (one for one in done if one.error is not None))
        first = done[0] if done else Completion(row_id, [], "", "stop", 0)
        base = draft or first
        own = {
            "row_id": row_id,
            "token_ids": [],
            "finish_reason": "error" if error is not None else "stop" if draft is None else draft.finish_reason,
            "num_prompt_tokens": sum(one.num_prompt_tokens for one in counted),
            "num_cached_tokens": sum(one.num_cached_tokens for one in counted),
            "token_count": sum(one.num_tokens for one in counted),
            "error": error,
            "error_message": error_message,
            "queued_us": first.queued_us,
            "first_token_us": first.first_token_us,
            "last_token_us": max((one.last_token_us for one in done), default=0),
            "num_lost_prompt_tokens": lost[0],
            "num_lost_generated_tokens": lost[1],
            "quality": next((one.quality for one in done if one.quality is not None), None),
        }
        values = {f.name: getattr(base, f.name) for f in fields(Completion)} | own
        text = None if draft is None else draft.text
        return cls(**values, runs=tuple(runs), columns=columns or {}, returned=returned or {}, draft=text)


def _first_failed(done: Iterable[Completion]) -> Completion | None:
    return next((one for one in done if one.error is not None), None)


def _computed(done: Iterable[Completion]) -> tuple[int, int]:
    """Return the computed prompt tokens and generated tokens, with those of failed requests."""
    prompt = generated = 0
    for one in done:
        is_lost = one.error is not None
        prompt += one.num_lost_prompt_tokens if is_lost else one.num_prompt_tokens - one.num_cached_tokens
        generated += one.num_lost_generated_tokens if is_lost else one.num_tokens
    return prompt, generated


@dataclass
class _RowState:
    """State of a row. at: its last step. num_open: its open requests, all of that step. passed: number of runs before
    it. kept: requests that an earlier run finished, not yet replayed. turns: its chat. question, own_text: the prompt
    and the text of `RowTexts` of its open requests."""

    index: int
    kept: dict[tuple[int | str, int], Completion]
    at: int = 0
    num_open: int = 1
    passed: int = 0
    runs: list[StepRun] = field(default_factory=list)
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    repetitions: Counter[int] = field(default_factory=Counter)  # by step
    draft: Completion | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    question: str = ""
    own_text: str | None = None

    @property
    def has_failed(self) -> bool:
        return any(run.completion.error is not None for run in self.runs[self.passed :])

    def samples(self) -> list[Completion]:
        """Return the completions of the last step, in the order of their seeds."""
        return [run.completion for run in sorted(self.runs[self.passed :], key=lambda run: run.attempt)]


def num_needed(n: int, stop_at: float, answers: Sequence[str]) -> int:
    """Return the minimum number of further samples that may settle a vote of `n` samples; 0 if it is settled: an answer
    has the share `stop_at` of n, or none can reach it. If the samples of each round are computed together, a row has as
    many as if they were computed one by one, since both ways of a settlement are waited for."""
    needed, most = ceil(stop_at * n - 1e-9), max(Counter(answers).values(), default=0)
    reachable = most + n - len(answers)
    return max(0, min(needed - most, reachable - needed + 1))


class RowsOfSteps:
    """Rows of one unit on their way through the steps. Not thread-safe."""

    poll_s = None

    def __init__(self, job: ResolvedJob, readers: Sequence[RowReader], unit: Unit, kept: Iterable[Completion]) -> None:
        """readers: of the job's prompts. kept: rows of a stopped run, whose requests are replayed."""
        self._job, self._readers, self._unit = job, readers, unit
        self._kept = {row.row_id: row.runs for row in kept if isinstance(row, RowOfSteps)}
        self._rows: dict[int, _RowState] = {}
        self._ended: list[RowOfSteps] = []
        self._params: dict[RunId, SamplingParams] = {}  # of open requests
        self._ids = unit.row_ids()
        self._index = {step.section.name: i for i, step in enumerate(job.steps, 1)}
        self._step_fields = {step.section.name: step.field for step in job.steps}

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    def begin(self, requests: Iterable[AnyRequest]) -> list[AnyRequest]:
        """Return the requests to send for rows with these first requests."""
        begun: list[_RowState] = []
        to_send: list[AnyRequest] = []
        for request in requests:
            assert isinstance(request.row_id, int)
            kept = {(run.step, run.attempt): run.completion for run in self._kept.get(request.row_id, ())}
            row = self._rows[request.row_id] = _RowState(request.row_id, kept)
            if (0, 0) not in kept:
                to_send.append(self._sent(request, RunId(row.index, 0, 0)))
            elif self._finish(row, 0, 0, row.kept.pop((0, 0))):
                begun.append(row)
        return to_send + self._followed(begun)

    def follow_up(self, completions: Iterable[Completion]) -> list[AnyRequest]:
        """Record finished requests. Return those that follow from them."""
        rows = []
        for done in completions:
            assert isinstance(done.row_id, RunId)
            row_id, step, attempt = done.row_id
            row = self._rows[row_id]
            if self._finish(row, step, attempt, checked(done, self._params.pop(done.row_id))):
                rows.append(row)
        return self._followed(rows)

    def finished(self) -> list[RowOfSteps]:
        """Return the rows that have ended."""
        return self._ended

    def unfinished(self) -> list[RowOfSteps]:
        """Return the other rows that have finished a request, as far as they came."""
        found = []
        for row in self._rows.values():
            runs = [*row.runs, *(StepRun(*key, done) for key, done in row.kept.items())]
            if runs:
                found.append(RowOfSteps.of_runs(row.index, runs))
        return found

    def _followed(self, rows: list[_RowState]) -> list[AnyRequest]:
        """Return the next requests of rows whose last ones have finished, and end rows without one."""
        to_send: list[AnyRequest] = []
        while rows:
            by_step, rows = self._next_steps(rows), []
            for step, some in by_step.items():
                requests, finished = self._requests(step, some)
                to_send += requests
                rows += finished
        return to_send

    def _next_steps(self, rows: list[_RowState]) -> dict[int, list[_RowState]]:
        """Return the rows by their next step: the last one if its vote is not settled, else one after it. End rows
        without one. Skipped steps count as passed."""
        found: dict[int, list[_RowState]] = {}
        passed: dict[int, list[_RowState]] = {}  # by the step
        for row in rows:
            if row.has_failed:
                self._end(row)
            else:
                is_open = row.at and self._num_samples(row.at, row)
                (found if is_open else passed).setdefault(row.at, []).append(row)
        while passed:
            at, some = passed.popitem()
            for step, reached in self._after(at, some).items():
                if step > len(self._job.steps):
                    for row in reached:
                        self._end(row)
                    continue
                for row, is_met in zip(reached, self._met(self._job.steps[step - 1].when, reached), strict=True):
                    if is_met:
                        row.at, row.passed = step, len(row.runs)
                    (found if is_met else passed).setdefault(step, []).append(row)
        return found

    def _after(self, at: int, rows: list[_RowState]) -> dict[int, list[_RowState]]:
        """Return the rows by the step that they reach after this one: another one, or the first to repeat."""
        repeat = self._job.steps[at - 1].section.repeat if at else None
        if repeat is None:
            return {at + 1: rows}
        found: dict[int, list[_RowState]] = {}
        for row, is_met in zip(rows, self._met(self._job.steps[at - 1].until, rows), strict=True):
            is_repeated = not is_met and row.repetitions[at] < repeat.at_most
            row.repetitions[at] += is_repeated
            found.setdefault(self._index[repeat.from_step] if is_repeated else at + 1, []).append(row)
        return found

    def _num_samples(self, step: int, row: _RowState) -> int:
        """Return the number of samples that the step's vote needs next; 0 if it is settled, or there is none."""
        vote = self._job.steps[step - 1].section.vote
        return 0 if vote is None else num_needed(vote.n, vote.stop_at, [_answer(one) for one in row.samples()])

    def _met(self, condition: Condition | None, rows: list[_RowState]) -> list[bool]:
        """Return whether rows meet the condition, if there is one."""
        if condition is None:
            return [True] * len(rows)
        columns = self._columns(condition.columns, rows)
        return condition.met(pa.Table.from_arrays([*columns.values()], [*columns]))

    def _end(self, row: _RowState) -> None:
        del self._rows[row.index]
        columns = {name: row.columns.get(name) for name in self._step_fields}
        failed = _first_failed(run.completion for run in row.runs)
        error, message = (failed.error, failed.error_message) if failed is not None else (None, None)
        if failed is not None and row.at:
            message = f"step {self._job.steps[row.at - 1].section.name}: {message}"
        done = RowOfSteps.of_runs(row.index, row.runs, row.draft, columns, error=error, error_message=message)
        self._ended.append(done)

    def _requests(self, step: int, rows: list[_RowState]) -> tuple[list[AnyRequest], list[_RowState]]:
        """Return the requests to send for this step of rows, and the rows whose requests have all finished: refused
        ones, and those that an earlier run computed."""
        attempts: list[tuple[_RowState, int]] = []  # with the attempt
        for row in rows:
            first = sum(run.step == step for run in row.runs)
            row.num_open = self._num_samples(step, row) or 1  # all samples of a round
            attempts += [(row, attempt) for attempt in range(first, first + row.num_open)]
        unit = self._unit_of(self._job.steps[step - 1], attempts)
        for (row, _), text in zip(attempts, unit.own("_texts").to_pylist()):
            row.own_text = text
        to_send: list[AnyRequest] = []
        finished: list[_RowState] = []
        requests, failed = self._readers[step](unit)
        for done in failed:
            row, attempt = attempts[done.row_id]  # type: ignore[index]
            if self._finish(row, step, attempt, done):
                finished.append(row)
        for request in requests:
            row, attempt = attempts[request.row_id]  # type: ignore[index]
            if (step, attempt) not in row.kept:
                to_send.append(self._sent(request, RunId(row.index, step, attempt)))
            elif self._finish(row, step, attempt, row.kept.pop((step, attempt))):
                finished.append(row)
        return to_send, finished

    def _sent(self, request: AnyRequest, run_id: RunId) -> AnyRequest:
        self._params[run_id] = request.params
        last = self._job.steps[-1].section
        is_last = run_id.step == len(self._job.steps) and last.repeat is None and last.vote is None
        return replace(request, row_id=run_id, is_follow_up=run_id.step > 0, expects_follow_up=not is_last)

    def _finish(self, row: _RowState, step: int, attempt: int, done: Completion) -> bool:
        """Record a request of a row. Return whether none is open now."""
        row.runs.append(StepRun(step, attempt, replace(done, row_id=row.index)))
        row.num_open -= 1
        if row.num_open:
            return False
        if step == 0:
            row.draft = done if done.error is None else None
        elif row.has_failed or not self._num_samples(step, row):
            self._pass(row, self._job.steps[step - 1])
        return True

    def _pass(self, row: _RowState, step: ResolvedStep) -> None:
        """Set what follows from the last step of a row."""
        samples = row.samples()
        votes = Counter(map(_answer, samples))
        done = _first_failed(samples) or max(samples, key=lambda one: votes[_answer(one)])  # the first of equal ones
        values = self._values(step, row, done)
        if step.section.vote is not None:
            values["votes"] = None if done.error is not None else votes[_answer(done)]
        row.columns[step.section.name] = values
        if step.prompt.continues_chat:
            answer = values.get("label") if step.task is not None else done.text
            row.turns.append(_turn("user", row.question))
            row.turns += [] if answer is None else [_turn("assistant", answer)]
        if done.error is None and step.section.replaces == DRAFT:
            row.draft = done

    def _values(self, step: ResolvedStep, row: _RowState, last: Completion) -> dict[str, Any]:
        """Return the values of a step's column. last: its completion."""
        if step.task is not None:
            columns = step.task.columns([last], [row.own_text])
            values = {f.name: column[0] for f, column in zip(step.task.fields, columns, strict=True)}
        else:
            text = last.text if last.error is None else None
            values = {"generated_text": text, "finish_reason": last.finish_reason}
            values |= {"reasoning": last.reasoning, "num_reasoning_tokens": last.num_reasoning_tokens}
        done = [run.completion for run in row.runs if run.step == row.at]
        return values | {
            "error": last.error,
            "error_message": last.error_message,
            "num_input_tokens": sum(one.num_prompt_tokens for one in done),
            "num_cached_tokens": sum(one.num_cached_tokens for one in done),
            "num_generated_tokens": sum(one.num_tokens for one in done),
            "attempts": len(done),
        }

    def _unit_of(self, step: ResolvedStep, attempts: list[tuple[_RowState, int]]) -> Unit:
        """Return the attempts of rows as a unit with the step's prompts."""
        rows = [row for row, _ in attempts]
        ids = [self._ids[row.index] for row in rows]
        seed, name = self._job.config.seed, step.section.name
        seeds = [step_seed(seed, *row_id, name, attempt) for row_id, (_, attempt) in zip(ids, attempts, strict=True)]
        columns = self._columns([name for name in step.units.columns if name != SEED], rows)
        columns[SEED] = pa.array(seeds, pa.int64())
        files = pa.array([file for file, _ in ids], pa.string()), pa.array([row for _, row in ids], pa.int64())
        unit = one_unit(pa.Table.from_arrays([*columns.values(), *files], [*columns, "", ""]), step.units)
        if not step.prompt.continues_chat:
            return unit
        chats = [self._continued(row, prompt) for row, prompt in zip(rows, unit.own("_prompt").to_pylist())]
        return unit.with_own("_prompt", chats)

    def _columns(self, names: Iterable[str], rows: list[_RowState]) -> dict[str, Any]:
        """Return columns of rows by name: the draft, results of steps, and columns of the input."""
        found: dict[str, Any] = {}
        for name in names:
            if name == DRAFT:
                found[name] = pa.array([row.draft and row.draft.text for row in rows], pa.string())
            elif name in self._step_fields:
                found[name] = pa.array([row.columns.get(name) for row in rows], self._step_fields[name].type)
            else:
                of_unit = pa.Table.from_struct_array(self._unit.own("_inputs")).column(name)
                found[name] = of_unit.take(pa.array([row.index for row in rows], pa.int64()))
        return found

    def _continued(self, row: _RowState, prompt: str | None) -> str | None:
        """Return a row's chat with a prompt as the user's next turn, as JSON. None without a prompt."""
        if prompt is None:
            return None
        if not row.turns:
            first = self._unit.own("_prompt")[row.index].as_py()
            is_chat = self._job.prompt.messages is not None
            turns = json.loads(first) if is_chat else [_turn("user", first)]
            row.turns = [*turns, _turn("assistant", row.runs[0].completion.text)]
        row.question = prompt
        return json.dumps([*row.turns, _turn("user", prompt)], ensure_ascii=False)


def _answer(done: Completion) -> str:
    """Return the text that samples of a vote are compared by."""
    return done.text.strip()


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


SEED = "\0seed"  # column with the seed of each request; no input column has this name
