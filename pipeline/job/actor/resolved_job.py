"""A job with all values filled in: those that its model, its input's columns and its lines determine.

Only `planning/resolution.py` creates it; `run`, `plan`, `generate` and the actors of a run read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.config import FromColumn, JobConfig
from pipeline.config.identity import window_bytes
from pipeline.config.sections.model import ModelSection
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.sampling import DEFAULT_MAX_TOKENS, SamplingSection
from pipeline.config.sections.steps import StepSection
from pipeline.config.sections.structured import StructuredFromColumn
from pipeline.config.sections.task import TaskSection
from pipeline.data.conditions import Condition
from pipeline.data.output.result_columns import ResultShape, step_field
from pipeline.data.prompts import PromptSpec
from pipeline.data.requests.request_row import PARAMETERS, REFUSED
from pipeline.data.row_adapters import RowAdapters
from pipeline.data.row_texts import RowTexts
from pipeline.data.units import MAX_STRETCH_BYTES, UnitSpec
from pipeline.endpoint.spec import EndpointConfig, Route
from pipeline.engine.config import EngineConfig
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError
from pipeline.job.actor.control_tokens import AuthorTexts, author_texts
from pipeline.job.actor.endpoint_rows import EndpointRows
from pipeline.job.actor.row_function import RowFunction
from pipeline.job.actor.tasks import JobTask
from pipeline.job.actor.tokenize import Chat, Tokenize, chat_of

if TYPE_CHECKING:
    from pipeline.tokenization.tokenizer import Tokenizer

PROMPT = "prompt"  # column of the prompts that a row function makes


@dataclass(frozen=True, kw_only=True)
class ResolvedPrompt:
    """A resolved prompt of each row: the job's first, or that of a step. `config` is the job file as written. The
    sections `prompt`, `sampling` and `task_section` include the values of the input's lines and of the checkpoint."""

    config: JobConfig
    prompt: PromptSection
    sampling: SamplingSection
    task_section: TaskSection
    task: JobTask | None  # None: generate text
    params: SamplingParams  # defaults of rows without values of their own
    units: UnitSpec  # rules for rendering rows and cutting units
    results: ResultShape  # the output's columns, without the kept ones

    @property
    def author(self) -> AuthorTexts:
        """Texts that the job file itself puts into prompts."""
        return author_texts(self.units.prompt, self.prompt)

    def chat(self, now: datetime | None) -> Chat | None:
        """Return the chat settings, or None if prompts are sent as they are. now: the date, if the job file has
        none."""
        return chat_of(self.prompt, self.task_section.type, now)

    def tokenize(self, tokenizer: "Tokenizer", now: datetime | None, *, quality_sample: float = 0.0) -> Tokenize:
        """Return the function that turns a unit's rows into requests of our own engine. now: see `chat`.
        quality_sample: share of rows to compare with the reference model."""
        chat, config = self.chat(now), self.config
        return Tokenize(tokenizer, self.params, config.seed, chat, quality_sample, self.task, self.author)

    def endpoint_rows(self, route: Route, tokenizer: "Tokenizer | None", now: datetime | None) -> EndpointRows:
        """Return the function that turns a unit's rows into requests to a server. tokenizer: counts prompt tokens, if
        the model is on this machine. now: see `chat`."""
        return EndpointRows(route, tokenizer, self.params, self.config.seed, self.chat(now), self.task, self.author)


@dataclass(frozen=True, kw_only=True)
class ResolvedStep(ResolvedPrompt):
    """A resolved step. `results` are the fields of its column in the output."""

    section: StepSection
    when: Condition | None = None
    until: Condition | None = None  # ends `section.repeat`

    @property
    def field(self) -> pa.Field:
        """The step's column in the output."""
        return step_field(self.section.name, self.results, self.section.vote is not None)

    def chat(self, now: datetime | None) -> Chat | None:
        chat = super().chat(now)
        return chat and replace(chat, from_messages=chat.from_messages or self.prompt.continues_chat)


@dataclass(frozen=True, kw_only=True)
class ResolvedJob(ResolvedPrompt):
    """A resolved job."""

    steps: tuple[ResolvedStep, ...] = ()
    row_fn: RowFunction | None = None
    model: Path | None  # the folder of the checkpoint on this machine; None: only a server knows the model
    draft: Path | None
    adapters: Mapping[str, Path]  # folders of the adapters that rows may use, by name
    reference: Path | None  # folder of the reference model of quality.sample
    chat_template: str | None  # the text of prompt.chat.chat_template; None: the checkpoint's own, or none

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint. Raises ConfigError if only a server knows the model."""
        if self.model is None:
            raise ConfigError("server: the server has the model; this command needs our own engine")
        return self.model

    @property
    def keys(self) -> JobConfig:
        """Job file with the resolved values that determine the job's identity."""
        found = {"prompt": self.prompt, "sampling": self.sampling, "task": self.task_section}
        return self.config.model_copy(update=found)

    @property
    def prompt_units(self) -> UnitSpec:
        """`units` without the columns that are only kept, for reading prompts alone."""
        return replace(self.units, kept=())

    @property
    def prompts(self) -> tuple[ResolvedPrompt, ...]:
        """The job's first prompt, and those of its steps or its row function."""
        if self.row_fn is None:
            return self, *self.steps
        chat = self.prompt.chat
        prompt = PromptSection(column=PROMPT) if chat is None else PromptSection(messages=PROMPT, chat=chat)
        made = ResolvedPrompt(
            config=self.config,
            prompt=prompt,
            sampling=self.sampling,
            task_section=self.task_section,
            task=None,
            params=self.params,
            units=UnitSpec(prompt_spec(self.config, prompt)),
            results=self.results,
        )
        return self, made

    def engine_config(self, num_threads: int | None = None) -> EngineConfig:
        """Return the config of this project's engine."""
        adapters = {name: str(folder) for name, folder in self.adapters.items()}
        return self.config.engine_config(str(self.checkpoint), self.draft and str(self.draft), num_threads, adapters)

    def work_config(self, num_threads: int | None = None) -> EngineConfig | EndpointConfig:
        """Return the config of what computes the rows."""
        server = self.config.server
        if server is None:
            return self.engine_config(num_threads)
        return server.config(
            route="embedding" if self.task is not None else "completion" if self.prompt.chat is None else "chat",
            max_concurrency=self.config.engine.max_num_seqs or EndpointConfig.max_concurrency,
            stall_timeout_s=self.config.run.stall_timeout,
            params=self.params,
            dimensions=self.task_section.dimensions or 0,
            images=self.config.images.options(),
            storage_options=self.config.storage_options,
        )


def sampling_params(sampling: SamplingSection) -> SamplingParams:
    """Return the sampling values that are the same for every row. Those from a column keep their defaults. Exception:
    with a constant `n` above 1, rows whose temperature is null use 1."""
    constant = {name: value for name, value in sampling if not isinstance(value, FromColumn)}
    del constant["generation_config"]
    if sampling.repetition_detection is not None:
        constant["repetition_detection"] = sampling.repetition_detection.params()
    if "max_tokens" not in constant:  # min_tokens may exceed the default of max_tokens
        constant["max_tokens"] = max(DEFAULT_MAX_TOKENS, constant.get("min_tokens", 0))
    if "temperature" not in constant and constant.get("n", 1) > 1:
        constant["temperature"] = 1.0
    return SamplingParams(**constant)


def sampling_columns(config: JobConfig) -> Mapping[str, str]:
    """Return the options that rows may set themselves: option (such as `structured_outputs.json`) to column. A null
    value means the job's value."""
    if config.input.has_requests:
        return {name: name for name in PARAMETERS} if config.task.type == "generate" else {}
    return {
        f"{name}.{value.kind}" if isinstance(value, StructuredFromColumn) else name: value.column
        for name, value in config.sampling
        if isinstance(value, FromColumn)
    }


def row_adapters(model: ModelSection) -> RowAdapters | None:
    """Return the rule that finds the adapter of each row; None: no row has one."""
    if model.adapter is None:
        return None
    column = model.adapter.column if isinstance(model.adapter, FromColumn) else None
    return RowAdapters(tuple(model.used_adapters), column)


def prompt_spec(config: JobConfig, prompt: PromptSection) -> PromptSpec:
    """Return the rule that renders rows as prompts, or rejects them as requests."""
    spec = replace(prompt.spec(), media=config.server is not None)
    return replace(spec, refused=REFUSED) if config.input.has_requests else spec


def result_shape(
    config: JobConfig,
    sampling: SamplingSection,
    task_fields: tuple[pa.Field, ...] | None = None,
    steps: tuple[pa.Field, ...] = (),
    returned: tuple[pa.Field, ...] = (),
) -> ResultShape:
    """Return the shape of the result columns. task_fields: result columns of a task; None for generation. steps,
    returned: columns of the steps, and of the row function."""
    of_requests = config.input.has_requests and config.task.type == "generate"
    return ResultShape(
        "rows" if config.output.samples_as == "rows" else "one" if sampling.n == 1 else "lists",
        logprobs=sampling.logprobs is not None or of_requests,  # some request rows may ask for logprobs
        prompt_logprobs=sampling.prompt_logprobs is not None,
        reasoning=sampling.reasoning is not None,
        tool_calls=config.server is not None and config.server.config().has_tools,
        task_fields=task_fields,
        dropped_by=config.input.when is not None or config.output.accept is not None,
        steps=steps,
        returned=returned,
    )


def unit_spec(
    config: JobConfig,
    prompt: PromptSpec,
    texts: RowTexts | None,
    params: SamplingParams,
    kept: tuple[str, ...],
    step_columns: tuple[str, ...] = (),
    step_tokens: int = 0,
) -> UnitSpec:
    """Return the rule that renders rows and cuts them into units. texts: additional texts of rows. kept: input columns
    to keep. step_columns, step_tokens: see `UnitSpec`."""
    return UnitSpec(
        prompt,
        kept,
        sampling_columns(config),
        default_max_tokens=params.max_tokens if config.task.type == "generate" else 0,
        unit_rows=config.output.rows_per_file,
        expected=config.quality.column if config.quality.sample > 0 else None,
        default_n=params.n,
        texts=texts,
        adapters=row_adapters(config.model),
        when=config.input.condition,
        max_bytes=min(window_bytes(config) * 3 // 2, MAX_STRETCH_BYTES),  # most full windows fit in one stretch
        step_columns=step_columns,
        step_tokens=step_tokens,
        max_pixels=config.images.max_pixels,
    )
