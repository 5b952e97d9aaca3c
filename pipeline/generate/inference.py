"""Run a few prompts through an engine in this process, or a server. Rows are rendered and seeded as in a job."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.data.output.result_columns import REASONING_FIELDS, RESULT_FIELDS, TOOL_CALLS_FIELD, output_schema
from pipeline.data.units import make_units
from pipeline.endpoint.spec import EndpointConfig
from pipeline.engine.completion import Completion
from pipeline.errors import ConfigError
from pipeline.formatting import Remaining
from pipeline.generate.answer import Answer, Saved
from pipeline.generate.prompts import Prompts
from pipeline.job.actor.resolved_job import ResolvedJob
from pipeline.job.actor.work_spec import RowReader
from pipeline.job.planning.resolution import resolve_rows
from pipeline.machine.host import wall_time
from pipeline.stores.redaction import shown_url

_RENAME = {"source_row": "source_line"}  # lines are counted from 1, like in editors, including empty lines

Log = Callable[[str], None]
Stream = Callable[[list[Any]], Iterator[Completion]]


@dataclass(frozen=True)
class Done:
    """Totals of all prompts. Tokens are those of completed prompts."""

    prompts: int
    failed: int
    num_input_tokens: int
    num_generated_tokens: int
    seconds: float

    def to_text(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"{self.prompts:,} prompt{'' if self.prompts == 1 else 's'}{failed}; {self.num_input_tokens:,} tokens in, "
            f"{self.num_generated_tokens:,} out, {self.seconds:.1f} s"
        )


def complete(
    config: JobConfig, prompts: Prompts, saved: Saved | None, show: Callable[[Answer], None], log: Log
) -> Done:
    """Run all prompts. Shows each answer in input order, or saves all to a file at the end.

    Failed prompts are counted and do not stop the others. Raises ConfigError, also for samples as rows.
    """
    if config.output.samples_as == "rows":
        raise ConfigError(
            "output.samples_as: rows is supported only in jobs, whose input is Parquet, a folder, a glob or a url. "
            "Here each prompt has one answer, with its samples in lists"
        )
    for key, condition in (("input.when", config.input.when), ("output.accept", config.output.accept)):
        if condition is not None:
            raise ConfigError(f"{key}: is supported only in jobs; here every prompt is completed and shown. Remove it")
    if config.steps:
        raise ConfigError("steps: are supported only in jobs; here prompts are completed")
    if config.task.type != "generate":
        raise ConfigError(f"task: {config.task.type} is supported only in jobs; here prompts are completed")
    log(f"loading {shown_url(config.model.path)}" if config.server is None else "connecting to the server")
    job = resolve_rows(config, prompts.columns, log)
    schema = _schema(prompts, job, log) if saved is not None else None
    began, to_save = time.monotonic(), []
    count: Counter[str] = Counter()
    for answer in answers(job, prompts, log):
        done = answer.completion
        completed = done.error is None
        read = done.num_prompt_tokens if completed else 0
        count.update(failed=not completed, read=read, generated=done.num_generated_tokens)
        if saved is None:
            show(answer)
        else:
            to_save.append(answer)
    if saved is not None and schema is not None:
        saved.write(to_save, schema)
        log(f"wrote {saved.path}")
    seconds = round(time.monotonic() - began, 3)
    totals = Done(prompts.num_rows, count["failed"], count["read"], count["generated"], seconds)
    log(totals.to_text())
    return totals


def answers(job: ResolvedJob, prompts: Prompts, log: Log) -> Iterator[Answer]:
    """Yield each prompt's answer in input order, as soon as it and all earlier ones have finished.

    A failed prompt yields an answer with an error. Raises ModelError, ConfigError before the first answer.
    """
    now, unit_spec = wall_time(), job.prompt_units
    units = make_units(prompts.table, unit_spec, window=0)
    with _opened(job, now, log) as (read, stream):
        rendered: dict[int, str | None] = {}
        requests: list[Any] = []
        done: dict[int, Completion] = {}
        for unit in units:
            lines = unit.own("source_row").to_pylist()
            prompts_as_text = (p and unit_spec.prompt.text_of(p) for p in unit.own("_prompt").to_pylist())
            rendered |= zip(lines, prompts_as_text)
            of_unit, failed = read(unit)
            requests += [replace(r, row_id=lines[r.row_id]) for r in of_unit]  # type: ignore[index]
            done |= {lines[c.row_id]: c for c in failed}  # type: ignore[index]
        requests.sort(key=lambda request: request.row_id)  # type: ignore[arg-type,return-value]
        finished = stream(requests)
        remaining, began, num_done, num_tokens = Remaining(log, "prompts", prompts.num_rows), time.monotonic(), 0, 0
        for values in prompts.table.to_pylist():
            line = values["source_row"]
            while line not in done:
                completion = next(finished)
                done[completion.row_id] = completion  # type: ignore[index]
                num_done, num_tokens = num_done + 1, num_tokens + completion.num_generated_tokens
                remaining(num_done, f"{num_tokens / (time.monotonic() - began):,.0f} tok/s out")
            yield _answer(rendered[line], values, done.pop(line), job)


@contextmanager
def _opened(job: ResolvedJob, now: datetime, log: Log) -> Iterator[tuple[RowReader, Stream]]:
    """Open the engine of a job in this process, or connect to its server. Yield the reader of its rows and the function
    that computes requests."""
    config = job.work_config()
    if isinstance(config, EndpointConfig):
        from pipeline.endpoint.engine import EndpointEngine

        with closing(EndpointEngine(config, log)) as server:
            read = job.endpoint_rows(config.route, None, now)
            yield read, server.stream
        return
    from pipeline.engine.engine import Engine

    with Engine(config, log) as engine:
        tokenizer = engine.tokenizer
        if job.chat_template is not None:
            from pipeline.tokenization.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_folder(config.model, job.chat_template)
        yield job.tokenize(tokenizer, now), engine.stream


def _schema(prompts: Prompts, job: ResolvedJob, log: Log) -> pa.Schema:
    """Return the columns of a saved result. Drops input keys with the name of a result column, and logs them."""
    names = prompts.table.schema.names[:-2]
    clashes = [name for name in names if name in _result_names(job)]
    if clashes:
        log(f"left out of the output, since result columns have the same names: {', '.join(clashes)}")
    kept = pa.schema([prompts.table.schema.field(i) for i, name in enumerate(names) if name not in clashes])
    return output_schema(kept, _RENAME, replace(job.results, logprobs=False, prompt_logprobs=False))


def _result_names(job: ResolvedJob) -> set[str]:
    """Return the names of the result columns."""
    fields = [*RESULT_FIELDS, *(REASONING_FIELDS if job.results.reasoning else ())]
    if job.results.tool_calls:
        fields.append(TOOL_CALLS_FIELD)
    return {*(f.name for f in fields), *_RENAME.values()}


def _answer(prompt: str | None, values: dict[str, Any], completion: Completion, job: ResolvedJob) -> Answer:
    """Build the answer of a row, with the columns of a job's output."""
    succeeded = completion.error is None
    text, reason = completion.text if succeeded else None, completion.finish_reason
    reasoning, calls = completion.reasoning, completion.tool_calls
    if job.results.samples == "lists":
        text = [one.text for one in completion.each] if succeeded else None
        reason = [one.finish_reason for one in completion.each] if succeeded else None
        reasoning = [one.reasoning for one in completion.each] if succeeded else None
        calls = [one.tool_calls for one in completion.each] if succeeded else None
    result = {
        "generated_text": text,
        "finish_reason": reason,
        "error": completion.error,
        "error_message": completion.error_message,
        "num_input_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "num_generated_tokens": completion.num_generated_tokens,
        "source_file": values["source_file"],
        "source_line": values["source_row"] + 1,
    }
    if job.results.reasoning:
        result |= {"reasoning": reasoning, "num_reasoning_tokens": completion.num_thought_tokens}
    if job.results.tool_calls:
        result["tool_calls"] = calls
    source = values["source_file"]
    if source != "--prompt":
        source += f" line {result['source_line']}"
    kept = {name: value for name, value in values.items() if name not in _result_names(job)}
    return Answer(prompt, source, completion, {**kept, **result})
