"""One whole job: a job file's keys, checked together, and what the other parts are told of them.

Owns what a job means to the engine, to the data and to the output. What makes two jobs different is in `identity.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, PrivateAttr, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from pipeline.checkpoints.chat_template import read_template
from pipeline.config.contradictions import contradiction_of_lines, contradictions, rules_for_editors
from pipeline.config.jobfile import Document, Value
from pipeline.config.keys import JobKeys
from pipeline.config.requests import filled, is_of_requests, prompt_of, sampling_of
from pipeline.config.sections.sampling import DEFAULT_MAX_TOKENS
from pipeline.config.sections.structured import StructuredFromColumn
from pipeline.config.values import FromColumn
from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.data.output.result_columns import ResultShape
    from pipeline.data.prompts import PromptSpec
    from pipeline.data.requests.input_checks import Requests
    from pipeline.data.requests.request_row import Endpoint
    from pipeline.data.units import UnitSpec


class JobConfig(JobKeys):
    """One job, complete and checked. `where` says which line a key came from."""

    model_config = ConfigDict(json_schema_extra=rules_for_editors)

    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

    @model_validator(mode="wrap")
    @classmethod
    def _agrees(cls, raw: Any, handler: Any) -> "JobConfig":
        """Keys that contradict each other are refused, all of them at once. Where the lines of the input are requests,
        they say the prompt, so the job file has none."""
        job = handler(filled(raw) if is_of_requests(raw) else raw)
        found = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{error}", {"error": why}),
                loc=tuple(key.split(".")),
                input=None,
            )
            for key, why in contradictions(job, raw)
        ]
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return job

    def where(self, key: str) -> str:
        """`file:line` of a dotted key, or of the nearest key around it that is written down."""
        return self._document.where(tuple(key.split(".")))

    def of_lines(self, found: "Requests | None") -> "JobConfig":
        """The job once its input is read. found: what the lines are; None: they are no requests. Raises ConfigError
        where the lines ask for something else than the job file."""
        if found is None:
            return self
        written = self.data.get("prompt")
        wants_chats = isinstance(written, Mapping) and written.get("chat") not in (None, False)
        if wrong := contradiction_of_lines(self, found, wants_chats):
            raise ConfigError(": ".join(wrong))
        job = self.of_endpoint(found.endpoint, found.samples, found.prompt_logprobs)
        if found.dimensions is None:
            return job
        return job.model_copy(update={"task": self.task.model_copy(update={"dimensions": found.dimensions})})

    def of_endpoint(self, endpoint: "Endpoint", samples: bool = False, prompt_logprobs: bool = False) -> "JobConfig":
        """The job whose lines are requests for this endpoint. samples: whether some ask for several completions;
        prompt_logprobs: whether some ask for those."""
        assert self.input.has_requests
        sampling = sampling_of(endpoint, self.sampling, samples, prompt_logprobs)
        new = {"prompt": prompt_of(endpoint, self.prompt), "sampling": sampling}
        return self.model_copy(update=new)

    @property
    def data(self) -> Mapping[str, Value]:
        """The job file's values after overlays, `--set` and variables, without defaults."""
        return self._document.data

    def engine_config(self, model_path: str, draft_path: str | None, num_threads: int | None = None) -> EngineConfig:
        """The engine's options, with the folders that the model and its draft model were found in."""
        generates = self.task.type == "generate"
        return EngineConfig(
            model=model_path,
            quantization=self.model.quantization,
            speculation=self.speculation.engine_config(draft_path) if generates else "off",
            num_threads=num_threads,
            **self.engine.model_dump(),
        )

    def sampling_params(self) -> SamplingParams:
        """The values that are the same for every row; those from a column are left at their defaults, but that a
        temperature beside a constant `n` above 1 is then 1: rows whose temperature is null have it."""
        constant = {name: value for name, value in self.sampling if not isinstance(value, FromColumn)}
        del constant["generation_config"]
        if self.sampling.repetition_detection is not None:
            constant["repetition_detection"] = self.sampling.repetition_detection.params()
        if "max_tokens" not in constant:  # a constant min_tokens may be above max_tokens' default
            constant["max_tokens"] = max(DEFAULT_MAX_TOKENS, constant.get("min_tokens", 0))
        if "temperature" not in constant and constant.get("n", 1) > 1:
            constant["temperature"] = 1.0
        return SamplingParams(**constant)

    def sampling_columns(self) -> dict[str, str]:
        """Of the options that each row may set itself: option (`structured_outputs.json` and the like) to column. A
        null there means the job's value."""
        if self.input.has_requests:
            from pipeline.data.requests.request_row import PARAMETERS

            return {name: name for name in PARAMETERS} if self.task.type == "generate" else {}
        return {
            f"{name}.{value.kind}" if isinstance(value, StructuredFromColumn) else name: value.column
            for name, value in self.sampling
            if isinstance(value, FromColumn)
        }

    def prompt_spec(self) -> "PromptSpec":
        """How rows become prompts, or are refused as requests."""
        if not self.input.has_requests:
            return self.prompt.spec()
        from pipeline.data.requests.request_row import REFUSED

        return replace(self.prompt.spec(), refused=REFUSED)

    def result_shape(self, task_fields: "tuple[pa.Field, ...] | None" = None) -> "ResultShape":
        """The result columns. task_fields: those of a job that does not generate."""
        from pipeline.data.output.result_columns import ResultShape

        sampling, of_requests = self.sampling, self.input.has_requests and self.task.type == "generate"
        samples = "rows" if self.output.samples == "rows" else "one" if sampling.n == 1 else "lists"
        return ResultShape(
            samples,
            logprobs=sampling.logprobs is not None or of_requests,  # some rows of requests may ask for theirs
            prompt_logprobs=sampling.prompt_logprobs is not None,
            reasoning=sampling.reasoning is not None,
            task_fields=task_fields,
        )

    def unit_spec(self, kept: tuple[str, ...] = ()) -> "UnitSpec":
        """How rows are rendered and cut into units; `kept`: the input columns that go with them."""
        from pipeline.data.source import WINDOW_BYTES
        from pipeline.data.units import MAX_STRETCH_BYTES, UnitSpec

        params = self.sampling_params()
        return UnitSpec(
            self.prompt_spec(),
            kept,
            self.sampling_columns(),
            default_max_tokens=params.max_tokens if self.task.type == "generate" else 0,
            unit_rows=self.output.rows_per_file,
            expected=self.quality.column if self.quality.sample > 0 else None,
            default_n=params.n,
            texts=self.task.row_texts(),
            max_bytes=min(WINDOW_BYTES * 3 // 2, MAX_STRETCH_BYTES),  # those of a full window are one stretch, mostly
        )

    def chat_template(self) -> str | None:
        """What is in the file of `prompt.chat.template`, where there is one. Raises ConfigError."""
        chat = self.prompt.chat
        return None if chat is None or chat.template is None else read_template(chat.template)
