"""One whole job, and the three classes its keys fall into: identity, numerics, free.

*Identity* is what makes the output another output: resuming with a change there is refused. *Numerics* may
change a token by rounding. *Free* may change from run to run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, PrivateAttr, StringConstraints, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from pipeline.checkpoints.chat_template import read_template
from pipeline.config.jobfile import Document, Value
from pipeline.config.parameters import TodaySection
from pipeline.config.requests import (
    FORMATS,
    SOURCES,
    contradiction,
    contradiction_of_lines,
    equal_samples,
    filled,
    is_of_requests,
    prompt_of,
    sampling_of,
)
from pipeline.config.sections.cluster import ClusterSection
from pipeline.config.sections.cost import CostSection
from pipeline.config.sections.engine import EngineSection, SpeculationSection
from pipeline.config.sections.input import InputSection
from pipeline.config.sections.model import ModelSection
from pipeline.config.sections.output import OutputSection
from pipeline.config.sections.quality import QualitySection
from pipeline.config.sections.row.prompt import PromptSection
from pipeline.config.sections.row.sampling import SamplingSection
from pipeline.config.sections.row.structured import StructuredFromColumn
from pipeline.config.sections.row.tasks import (
    ChoiceSection,
    ClassifySection,
    EmbedSection,
    ScoreSection,
    TaskName,
    contradictions,
    row_texts,
    sections_of_tasks,
)
from pipeline.config.sections.run import RunSection
from pipeline.config.sections.section import Section
from pipeline.config.sections.targets import TargetsSection
from pipeline.config.values import FromColumn
from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.errors import ConfigError
from pipeline.stores.redaction import shown_url

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.data.output.result_columns import ResultShape
    from pipeline.data.prompts import PromptSpec
    from pipeline.data.requests.input_checks import Requests
    from pipeline.data.requests.request_row import Endpoint
    from pipeline.data.units import UnitSpec

_CUT = {"window_rows", "window_bytes", "unit_tokens", "unit_rows"}  # of `run`: what the parts are made of


def _prompt_or_requests(schema: dict[str, Any]) -> None:
    """For editors: a job has a prompt from one source, or lines that say it."""
    of_requests = {"properties": {"format": {"enum": list(FORMATS)}}, "required": ["format"]}
    one_source = {"oneOf": [{"required": [key], "properties": {key: {"type": "string"}}} for key in SOURCES]}
    no_source = {"not": {"anyOf": [{"required": [key]} for key in (*SOURCES, "defaults")]}}
    schema["if"] = {"properties": {"input": of_requests}, "required": ["input"]}
    schema["then"] = {"properties": {"prompt": no_source}}
    schema["else"] = {"required": ["prompt"], "properties": {"prompt": one_source}}
    schema["required"] = [name for name in schema["required"] if name != "prompt"]
    schema["allOf"] = sections_of_tasks()


ParameterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class JobConfig(Section):
    """One job, complete and checked. `where` says which line a key came from."""

    model_config = ConfigDict(json_schema_extra=_prompt_or_requests)

    name: str = Field(
        default="",
        max_length=200,
        description="What reports call the job. The file's name when left out.",
        examples=["summarize"],
        json_schema_extra={"type": ["string", "null"]},
    )
    params: dict[ParameterName, str | TodaySection | None] = Field(
        default={},
        description="Names that stand as `${NAME}` in input.path and output.path, each with its text, {today: ZONE} "
        "for the date there, or null where every run gives it: --param NAME=VALUE.",
        examples=[{"date": {"today": "Europe/Berlin"}}],
    )
    input: InputSection = Field(description="What is read.", examples=[{"path": "prompts.parquet"}])
    prompt: PromptSection = Field(
        description="Where a row's prompt comes from: one of template, column and messages.",
        examples=[{"template": "Summarize: {text}"}, {"column": "text"}],
    )
    model: ModelSection = Field(description="Which checkpoint answers.", examples=[{"path": "Qwen/Qwen3-4B"}])
    task: TaskName = Field(
        default="generate",
        description="What is asked of each row: a completion (generate), which of some labels follows the prompt "
        "(choice), how likely a text is (score), a vector (embed), or the classes of a classification head (classify).",
        examples=["choice"],
    )
    choice: ChoiceSection = Field(
        default=ChoiceSection(),
        description="With task: choice, the labels.",
        examples=[{"labels": ["billing", "bug", "question"]}],
    )
    score: ScoreSection = Field(
        default=ScoreSection(),
        description="With task: score, which text is scored.",
        examples=[{"completion": "{answer}"}],
    )
    embed: EmbedSection = Field(
        default=EmbedSection(), description="With task: embed, what the vectors are.", examples=[{"pooling": "mean"}]
    )
    classify: ClassifySection = Field(
        default=ClassifySection(),
        description="With task: classify, what becomes of the head's logits.",
        examples=[{"activation": "sigmoid"}],
    )
    engine: EngineSection = Field(
        default=EngineSection(), description="How the engine computes.", examples=[{"dtype": "bfloat16"}]
    )
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="How tokens are chosen, in vLLM's names. All but seed, "
        "repetition_detection and reasoning may be {column: name}.",
        examples=[{"max_tokens": 256, "temperature": 0.7}],
    )
    output: OutputSection = Field(description="Where the results go.", examples=[{"path": "out/summarize"}])
    run: RunSection = Field(default=RunSection(), description="How the work is cut and run.", examples=[{"actors": 8}])
    cluster: ClusterSection = Field(
        default=ClusterSection(),
        description="The cluster that `pipeline render` writes manifests of.",
        examples=[{"image": "registry.example.com/parquet-batch-inference:0.1.0-cpu"}],
    )
    cost: CostSection = Field(
        default=CostSection(), description="What the machines cost, for the report.", examples=[{"hourly_usd": 2.5}]
    )
    quality: QualitySection = Field(
        default=QualitySection(),
        description="What the rows of run.quality_sample are compared with, and when that is an alarm.",
        examples=[{"model": "Qwen/Qwen3-4B", "column": "answer"}],
    )
    targets: TargetsSection = Field(
        default=TargetsSection(),
        description="What the finished job is expected to keep to, and who is told when it does not.",
        examples=[{"max_usd_per_1m_generated": 0.5}],
    )
    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

    @model_validator(mode="wrap")
    @classmethod
    def _of_requests(cls, raw: Any, handler: Any) -> "JobConfig":
        """Lines of `input.format` say the prompt, so a job file of them has none."""
        is_of_lines = is_of_requests(raw)
        job = handler(filled(raw) if is_of_lines else raw)
        found = contradiction(job.input, raw.get("prompt"), job.sampling) if is_of_lines else None
        if (found := found or equal_samples(job.sampling, is_of_lines)) is not None:
            key, why = found
            error = PydanticCustomError("value_error", "{error}", {"error": why})
            detail = InitErrorDetails(type=error, loc=tuple(key.split(".")), input=None)
            raise ValidationError.from_exception_data(cls.__name__, [detail])
        return job

    @model_validator(mode="wrap")
    @classmethod
    def _of_task(cls, raw: Any, handler: Any) -> "JobConfig":
        """Keys that say nothing with the job's task are refused, all of them at once."""
        job = handler(raw)
        found = [
            InitErrorDetails(
                type=PydanticCustomError("value_error", "{error}", {"error": why}),
                loc=tuple(key.split(".")),
                input=None,
            )
            for key, why in contradictions(
                job.task,
                job.model_fields_set,
                job.choice,
                job.sampling,
                job.input,
                job.model,
                job.engine,
                job.run,
                job.targets,
                job.output,
            )
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
        if wrong := contradiction_of_lines(found, self.task, self.embed.dimensions, wants_chats):
            raise ConfigError(": ".join(wrong))
        job = self.of_endpoint(found.endpoint, found.samples, found.prompt_logprobs)
        if found.dimensions is None:
            return job
        return job.model_copy(update={"embed": self.embed.model_copy(update={"dimensions": found.dimensions})})

    def of_endpoint(self, endpoint: "Endpoint", samples: bool = False, prompt_logprobs: bool = False) -> "JobConfig":
        """The job whose lines are requests for this endpoint. samples: whether some ask for several completions;
        prompt_logprobs: whether some ask for those."""
        assert self.input.requests is not None
        sampling = sampling_of(self.input.requests, endpoint, self.sampling, samples, prompt_logprobs)
        new = {"prompt": prompt_of(endpoint, self.prompt), "sampling": sampling}
        return self.model_copy(update=new)

    @property
    def data(self) -> Mapping[str, Value]:
        """What the job file says after overlays, `--set`, parameters and variables, without defaults."""
        return self._document.data

    def engine_config(self, model_path: str, draft_path: str | None, num_threads: int | None = None) -> EngineConfig:
        """The engine's options, with the folders that the model and its draft model were found in."""
        engine = self.engine.model_dump()
        if self.task != "generate":
            engine["speculation"] = "off"
        return EngineConfig(
            model=model_path,
            quantization=self.model.quantization,
            draft=draft_path,
            num_threads=num_threads,
            **engine,
        )

    @property
    def draft_model(self) -> str | None:
        """`model.draft`, where it is of use: not when nothing is to be drafted, or by another proposer."""
        wanted = self.engine.speculation
        is_named = isinstance(wanted, SpeculationSection) and wanted.proposer != "ngram"
        return self.model.draft if wanted == "auto" or is_named else None

    def sampling_params(self) -> SamplingParams:
        """The values that are the same for every row; those from a column are left at their defaults, but that a
        temperature beside a constant `n` above 1 is then 1: rows whose temperature is null have it."""
        constant = {name: value for name, value in self.sampling if not isinstance(value, FromColumn)}
        del constant["defaults"], constant["response_format"]
        if self.sampling.repetition_detection is not None:
            constant["repetition_detection"] = self.sampling.repetition_detection.params()
        if "max_tokens" not in constant:  # a constant min_tokens may be above max_tokens' default
            constant["max_tokens"] = max(SamplingParams.max_tokens, constant.get("min_tokens", 0))
        if "temperature" not in constant and constant.get("n", 1) > 1:
            constant["temperature"] = 1.0
        return SamplingParams(**constant)

    def sampling_columns(self) -> dict[str, str]:
        """Of the options that each row may set itself: option (`structured_outputs.json` and the like) to column. A
        null there means the job's value."""
        if self.input.requests is not None:
            from pipeline.data.requests.request_row import PARAMETERS

            return {name: name for name in PARAMETERS} if self.task == "generate" else {}
        return {
            f"{name}.{value.kind}" if isinstance(value, StructuredFromColumn) else name: value.column
            for name, value in self.sampling
            if isinstance(value, FromColumn)
        }

    def prompt_spec(self) -> "PromptSpec":
        """How rows become prompts, or are refused as requests."""
        if self.input.requests is None:
            return self.prompt.spec()
        from pipeline.data.requests.request_row import REFUSED

        return replace(self.prompt.spec(), refused=REFUSED)

    def result_shape(self, task_fields: "tuple[pa.Field, ...] | None" = None) -> "ResultShape":
        """The result columns. task_fields: those of a job that does not generate."""
        from pipeline.data.output.result_columns import ResultShape

        sampling, of_requests = self.sampling, self.input.requests is not None and self.task == "generate"
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
        from pipeline.data.units import UnitSpec

        params, run = self.sampling_params(), self.run
        return UnitSpec(
            self.prompt_spec(),
            kept,
            self.sampling_columns(),
            params.max_tokens if self.task == "generate" else 0,
            run.unit_tokens,
            run.unit_rows,
            self.quality.column if run.quality_sample > 0 else None,
            params.n,
            row_texts(self.task, self.choice, self.score, self.prompt.max_bytes),
        )

    def chat_template(self) -> str | None:
        """What is in the file of `prompt.chat.template`, where there is one. Raises ConfigError."""
        chat = self.prompt.chat
        return None if chat is None or chat.template is None else read_template(chat.template)

    @property
    def seed(self) -> int:
        """The job's seed: `sampling.seed` where given, else `engine.seed`."""
        return self.engine.seed if self.sampling.seed is None else self.sampling.seed

    def identity(self) -> dict[str, Any]:
        """What makes two jobs different jobs; the files' and the model's digests are added by the job, that of
        `prompt.chat.template`, and the date that a chat template is told, where it asks.

        Paths are not in it: data copied elsewhere is the same data. `repetition_detection`, `structured_outputs`,
        `prompt_logprobs`, `reasoning` and its budget, `n` and `output.samples` only where they are on: outputs of jobs
        from before they were there go on.
        """
        sampling = self.sampling.model_dump(mode="json", exclude={"seed", "defaults", "response_format"})
        optional = "repetition_detection", "structured_outputs", "prompt_logprobs", "reasoning", "thinking_token_budget"
        for name in optional:
            if sampling[name] is None:
                del sampling[name]
        if sampling["n"] == 1:
            del sampling["n"]
        return {
            "input": self.input.model_dump(mode="json", include={"columns", "limit"}) | self._format(),
            "prompt": self._prompt_identity(),
            "sampling": sampling,
            "seed": self.seed,
            "max_model_len": self.engine.max_model_len,
            "rename": dict(self.output.rename),
            "cut": self.run.model_dump(include=_CUT),
            **({"samples": "rows"} if self.output.samples == "rows" else {}),
            **self._task_identity(),
        }

    def _task_identity(self) -> dict[str, Any]:
        """Only where it is not to generate: outputs of jobs from before there were tasks go on."""
        if self.task == "generate":
            return {}
        return {"task": self.task, self.task: getattr(self, self.task).model_dump(mode="json")}

    def _format(self) -> dict[str, str]:
        return {} if self.input.requests is None else {"format": self.input.format}

    def _prompt_identity(self) -> dict[str, Any]:
        """`defaults` only where there are some, `continue_final_message` only where it is off: outputs of jobs from
        before they were there go on."""
        prompt = self.prompt.model_dump(mode="json", exclude={"chat": {"date", "template"}})
        if prompt["chat"] is not None and prompt["chat"]["continue_final_message"]:
            del prompt["chat"]["continue_final_message"]
        return prompt if prompt["defaults"] else {k: v for k, v in prompt.items() if k != "defaults"}

    def numerics(self) -> dict[str, Any]:
        """What may change a token by rounding, as configured; the job replaces `auto` by what it became.

        `quantization` and `deterministic` only where they are on: outputs of jobs from before they were there go on.
        """
        numerics: dict[str, Any] = {
            "device": self.engine.device.partition(":")[0],
            "dtype": self.engine.dtype,
            "kv_cache_dtype": self.engine.kv_cache_dtype,
            "activation_dtype": self.engine.activation_dtype,
            "kernels": self.engine.kernels,
        }
        if self.engine.deterministic:
            numerics["deterministic"] = True
        wanted = self.model.quantization
        return numerics if wanted == "none" else numerics | {"quantization": wanted}

    def free(self) -> dict[str, Any]:
        """What may change from run to run, without secrets: no storage options, no passwords in urls."""
        engine = self.engine.model_dump(exclude={"max_model_len", "seed", "deterministic", *self.numerics()})
        return {
            "name": self.name,
            "input": {"path": shown_url(self.input.path), "on_corrupt": self.input.on_corrupt},
            "model": self.model.model_dump(exclude={"storage", "quantization"})
            | {"path": shown_url(self.model.path), "draft": self.model.draft and shown_url(self.model.draft)},
            "engine": {"device": self.engine.device, **engine},
            "output": {"path": shown_url(self.output.path)},
            "run": self.run.model_dump(exclude=_CUT),
            "cost": self.cost.model_dump(),
            "targets": self.targets.limits(),
            "quality": self.quality.model_dump() | {"model": self.quality.model and shown_url(self.quality.model)},
        }
