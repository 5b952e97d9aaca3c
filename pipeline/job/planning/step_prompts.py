"""Check the steps of a job against the input's columns, and resolve them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.steps import DRAFT, StepSection
from pipeline.data.conditions import Condition
from pipeline.data.output.result_columns import RESULT_NAMES, ResultShape, step_field
from pipeline.data.prompts import PromptSpec
from pipeline.data.row_adapters import RowAdapters
from pipeline.data.row_texts import RowTexts
from pipeline.data.units import UnitSpec
from pipeline.errors import ConfigError, PipelineError
from pipeline.job.actor.resolved_job import ResolvedStep, prompt_spec, sampling_params
from pipeline.job.actor.steps import SEED
from pipeline.job.actor.task_of_job import plain_task
from pipeline.job.planning.checkpoint_values import reasoning_markers


@dataclass(frozen=True)
class StepPrompt:
    """Prompts of a step, its column in the output, and its conditions. columns: of the input that it reads."""

    prompt: PromptSection
    spec: PromptSpec
    texts: RowTexts | None
    results: ResultShape
    field: pa.Field
    columns: tuple[str, ...]
    when: Condition | None
    until: Condition | None


def step_prompts(config: JobConfig, schema: pa.Schema, names: Sequence[str]) -> Iterator[StepPrompt | PipelineError]:
    """Yield the prompt of each step, or its mistakes. schema: of the input. names: all columns of the input."""
    if DRAFT in names:
        yield ConfigError(f"steps: the input has a column {DRAFT!r}, which is the latest text in prompts", key="steps")
    known = _with(schema, pa.field(DRAFT, pa.string()))
    for i, step in enumerate(config.steps):
        at = f"steps[{i}]."
        if step.name in (*names, *RESULT_NAMES):
            owner = "the input" if step.name in names else "the output"
            yield ConfigError(f"{at}name: {owner} has a column {step.name!r}; choose another name", key=f"{at}name")
        task = plain_task(step.task)
        fields = None if task is None else task.fields
        results = ResultShape(reasoning=step.sampling.reasoning is not None, task_fields=fields)
        field = step_field(step.name, results, step.vote is not None)
        own = ".".join(("prompt", next(key for key in ("template", "column", "messages") if getattr(step.prompt, key))))
        try:
            prompt = _with_chat(step.prompt, config.prompt)
            spec, texts = prompt_spec(config, prompt).of_input(known.names), step.task.row_texts()
            texts = texts and texts.of_input(known.names)
            when = None if step.when is None else Condition.parse(step.when, "when")
            until = None if step.repeat is None else Condition.parse(step.repeat.until, "repeat.until")
            read: dict[str, PromptSpec | RowTexts | Condition] = {own: spec}
            if texts is not None:
                read[texts.key] = texts
            if when is not None:
                read[when.key] = when
            later = [one.name for one in config.steps[i:]]
            for key, each in read.items():
                _check_order(key, each.columns, later, schema.names)
                each.check(known)
            if until is not None:
                read[until.key] = until
                _check_order(until.key, until.columns, later[1:], schema.names)
                until.check(_with(known, field))
            columns = [name for each in read.values() for name in each.columns if name in schema.names]
            yield StepPrompt(prompt, spec, texts, results, field, tuple(dict.fromkeys(columns)), when, until)
        except ConfigError as error:
            text = str(error)
            text = text.replace("prompt:", f"{own}:", 1) if text.startswith("prompt:") else text
            yield ConfigError(f"{at}{text}", key=f"{at}{text.partition(':')[0]}")
        known = _with(known, field)


def _with(schema: pa.Schema, field: pa.Field) -> pa.Schema:
    """Return the schema with a field, which replaces one of the same name."""
    return pa.schema([*(f for f in schema if f.name != field.name), field])


def _with_chat(own: PromptSection, first: PromptSection) -> PromptSection:
    """Return a step's prompt with the chat options of the first prompt, where it has none of its own."""
    chat = own.chat
    if first.chat is not None:
        has_own = chat is not None and chat.model_fields_set
        chat = chat.model_copy(update={"date": first.chat.date}) if chat is not None and has_own else first.chat
    return own.model_copy(update={"chat": chat})


def _check_order(key: str, columns: Sequence[str], later: Sequence[str], inputs: Sequence[str]) -> None:
    """Raise ConfigError if a value of a step refers to a step that comes too late. later: the names of these."""
    for name in columns:
        if name in later and name not in inputs:
            expected = f"expected {DRAFT}, an earlier step or a column of the input"
            raise ConfigError(f"{key}: {name!r} is this step or a later one; {expected}")


def resolved_steps(config: JobConfig, prompts: Sequence[StepPrompt], model: Path | None) -> Iterator[ResolvedStep]:
    """Yield the resolved steps. model: the checkpoint's folder; None: a server has it. Raises ConfigError."""
    for step, own in zip(config.steps, prompts, strict=True):
        sampling, task = step.sampling, plain_task(step.task)
        if sampling.reasoning is not None and model is not None:
            sampling = sampling.model_copy(update={"reasoning": reasoning_markers(sampling, model)})
        adapters = None if step.adapter is None else RowAdapters((step.adapter,))
        yield ResolvedStep(
            config=config,
            prompt=own.prompt,
            sampling=sampling,
            task_section=step.task,
            task=task,
            params=sampling_params(sampling),
            units=UnitSpec(own.spec, sampling_columns={"seed": SEED}, texts=own.texts, adapters=adapters),
            results=own.results,
            section=step,
            when=own.when,
            until=own.until,
        )


def max_new_tokens(steps: Sequence[StepSection], repeated: bool = False) -> int:
    """Return the most tokens that a row's steps generate. repeated: with all repetitions."""
    found = [(sampling_params(step.sampling).max_tokens, step) for step in steps if step.task.type == "generate"]
    times = 1 + sum(step.repeat.at_most for step in steps if step.repeat is not None and repeated)
    return times * sum(tokens * (1 if step.vote is None else step.vote.n) for tokens, step in found)
