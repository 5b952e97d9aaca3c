"""A job once everything that its file leaves open is known: what its model, its input's columns and its lines decide.

`resolution.py` makes it, the one place that does; `run`, `plan` and `generate` read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from pipeline.config import FromColumn, JobConfig
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.sampling import DEFAULT_MAX_TOKENS, SamplingSection
from pipeline.config.sections.structured import StructuredFromColumn
from pipeline.config.sections.task import TaskSection
from pipeline.data.output.result_columns import ResultShape
from pipeline.data.prompts import PromptSpec
from pipeline.data.requests.request_row import PARAMETERS, REFUSED
from pipeline.data.row_texts import RowTexts
from pipeline.data.source import WINDOW_BYTES
from pipeline.data.units import MAX_STRETCH_BYTES, UnitSpec
from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.job.actor.control_tokens import AuthorTexts, author_texts
from pipeline.job.actor.tasks import JobTask
from pipeline.job.actor.tokenize import Chat, Tokenize, Tokenizer, chat_of


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """`config`: the job file as written. The sections `prompt`, `sampling` and `task_section` stand in place of its
    own, with the values of the input's lines and of the checkpoint filled in."""

    config: JobConfig
    prompt: PromptSection
    sampling: SamplingSection
    task_section: TaskSection
    model: Path  # the folder of the checkpoint on this machine
    draft: Path | None
    reference: Path | None  # of the quality watch
    chat_template: str | None  # the text of prompt.chat.template; None: the checkpoint's own, or none
    task: JobTask | None  # None: to generate
    params: SamplingParams  # of rows that give no values of their own
    units: UnitSpec  # how rows are rendered and cut into units
    results: ResultShape  # the columns of the output beside the kept ones

    @property
    def keys(self) -> JobConfig:
        """The job file with the values that were found, which decide what makes it another job."""
        found = {"prompt": self.prompt, "sampling": self.sampling, "task": self.task_section}
        return self.config.model_copy(update=found)

    @property
    def prompt_units(self) -> UnitSpec:
        """`units` without the columns that are only kept, to look at prompts alone."""
        return replace(self.units, kept=())

    @property
    def author(self) -> AuthorTexts:
        """The texts that the job file itself puts into prompts."""
        return author_texts(self.units.prompt, self.prompt)

    def chat(self, now: datetime | None) -> Chat | None:
        """How a prompt becomes a chat; None where it is sent as it is. now: the date, where the job file has none."""
        return chat_of(self.prompt, self.task_section.type, now)

    def engine_config(self, num_threads: int | None = None) -> EngineConfig:
        return self.config.engine_config(str(self.model), self.draft and str(self.draft), num_threads)

    def tokenize(self, tokenizer: Tokenizer, now: datetime | None) -> Tokenize:
        """Return what makes requests of a unit's rows. now: as `chat` takes it."""
        chat, author = self.chat(now), self.author
        return Tokenize(tokenizer, self.params, self.config.seed, chat, task=self.task, author=author)


def sampling_params(sampling: SamplingSection) -> SamplingParams:
    """The values that are the same for every row; those from a column are left at their defaults, but that a
    temperature beside a constant `n` above 1 is then 1: rows whose temperature is null have it."""
    constant = {name: value for name, value in sampling if not isinstance(value, FromColumn)}
    del constant["generation_config"]
    if sampling.repetition_detection is not None:
        constant["repetition_detection"] = sampling.repetition_detection.params()
    if "max_tokens" not in constant:  # a constant min_tokens may be above max_tokens' default
        constant["max_tokens"] = max(DEFAULT_MAX_TOKENS, constant.get("min_tokens", 0))
    if "temperature" not in constant and constant.get("n", 1) > 1:
        constant["temperature"] = 1.0
    return SamplingParams(**constant)


def sampling_columns(config: JobConfig) -> Mapping[str, str]:
    """The options that each row may set itself: option (`structured_outputs.json` and the like) to column. A null there
    means the job's value."""
    if config.input.has_requests:
        return {name: name for name in PARAMETERS} if config.task.type == "generate" else {}
    return {
        f"{name}.{value.kind}" if isinstance(value, StructuredFromColumn) else name: value.column
        for name, value in config.sampling
        if isinstance(value, FromColumn)
    }


def prompt_spec(config: JobConfig, prompt: PromptSection) -> PromptSpec:
    """How rows become prompts, or are refused as requests."""
    spec = prompt.spec()
    return replace(spec, refused=REFUSED) if config.input.has_requests else spec


def result_shape(
    config: JobConfig, sampling: SamplingSection, task_fields: tuple[pa.Field, ...] | None = None
) -> ResultShape:
    """The result columns. task_fields: those of a job that does not generate."""
    of_requests = config.input.has_requests and config.task.type == "generate"
    return ResultShape(
        "rows" if config.output.samples == "rows" else "one" if sampling.n == 1 else "lists",
        logprobs=sampling.logprobs is not None or of_requests,  # some rows of requests may ask for theirs
        prompt_logprobs=sampling.prompt_logprobs is not None,
        reasoning=sampling.reasoning is not None,
        task_fields=task_fields,
    )


def unit_spec(
    config: JobConfig, prompt: PromptSpec, texts: RowTexts | None, params: SamplingParams, kept: tuple[str, ...]
) -> UnitSpec:
    """How rows are rendered and cut into units. texts: those that rows bring beside their prompts. kept: the input
    columns that go with them."""
    return UnitSpec(
        prompt,
        kept,
        sampling_columns(config),
        default_max_tokens=params.max_tokens if config.task.type == "generate" else 0,
        unit_rows=config.output.rows_per_file,
        expected=config.quality.column if config.quality.sample > 0 else None,
        default_n=params.n,
        texts=texts,
        max_bytes=min(WINDOW_BYTES * 3 // 2, MAX_STRETCH_BYTES),  # those of a full window are one stretch, mostly
    )
