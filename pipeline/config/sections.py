"""The sections of a job file: every key with its type, range and default, and no more.

Values alone are checked here, and keys of one section against each other. Whether the columns, the model
and the output are there is found out later, by the job.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from pipeline.checkpoints.locate import EMBEDDED_MODELS
from pipeline.config.values import (
    FALSE_IS_OFF,
    UNION_TAGS,
    Bytes,
    Column,
    Columns,
    FromColumn,
    IntOrColumn,
    Moment,
    NumberOrColumn,
    Place,
    StringsOrColumn,
    Switch,
    SwitchOrColumn,
    TokenIdsOrColumn,
)
from pipeline.engine.params import SamplingParams
from pipeline.errors import ConfigError
from pipeline.stores.filesystem import is_url

if TYPE_CHECKING:
    from pipeline.data.prompts import PromptSpec


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class InputSection(Section):
    """What is read. `columns` None keeps every column in the output, an empty list none."""

    path: Place
    columns: Columns | None = None
    on_corrupt: Literal["fail", "skip"] = "fail"
    storage: dict[str, Any] = Field(default={}, repr=False)
    limit: int | None = Field(default=None, ge=1)


class ChatSection(Section):
    """How a prompt becomes a chat for the model's own template.

    `date` is what a template that asks for the date is told; null: the local time of the output's first run.
    """

    system: str | None = None
    add_generation_prompt: Switch = True
    template_kwargs: dict[str, Any] = {}
    date: Moment | None = None


class PromptSection(Section):
    """Where a row's prompt comes from: exactly one of `template`, `column` and `messages`.

    `chat` None sends the text as it is; `messages` always goes through the chat template.
    """

    template: str | None = Field(default=None, min_length=1)
    column: Column | None = None
    messages: Column | None = None
    chat: ChatSection | None = None
    max_bytes: Bytes = 8 * 2**20

    @field_validator("chat", mode="before")
    @classmethod
    def _chat_switch(cls, value: object) -> object:
        return {True: {}, False: None}[value] if isinstance(value, bool) else value

    @field_validator("template")
    @classmethod
    def _template_parses(cls, template: str | None) -> str | None:
        if template is not None:
            from pipeline.data.prompts import template_columns

            try:
                template_columns(template)
            except ConfigError as error:
                raise ValueError(error.problem("prompt.template")) from None
        return template

    @model_validator(mode="before")
    @classmethod
    def _messages_are_chat(cls, raw: object) -> object:
        if isinstance(raw, dict) and raw.get("messages") is not None and raw.get("chat") is None:
            return {**raw, "chat": {}}
        return raw

    @model_validator(mode="after")
    def _one_source(self) -> "PromptSection":
        given = [key for key in ("template", "column", "messages") if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"expected exactly one of template, column, messages; got {found}")
        return self

    def spec(self) -> "PromptSpec":
        """How rows become prompts."""
        from pipeline.data.prompts import PromptSpec

        return PromptSpec(self.column, self.template, self.messages, self.max_bytes)


class ModelSection(Section):
    """Which checkpoint: a folder, an fsspec url such as s3://, a Hugging Face id, or one of EMBEDDED_MODELS.

    `draft` is another one, smaller and with the same tokens, that proposes tokens for it to check. `quantization` makes
    the linears of a 16- or 32-bit checkpoint smaller while it is loaded; the draft model stays as it is.
    """

    path: Place
    storage: dict[str, Any] = Field(default={}, repr=False)
    draft: Place | None = None
    quantization: Literal["none", "int8", "int4-rtn", "nf4"] = "none"
    trust: Literal["never"] = "never"

    @field_validator("path", "draft")
    @classmethod
    def _embedded_exists(cls, path: str | None) -> str | None:
        if path is not None and path.startswith("demo:") and path not in EMBEDDED_MODELS:
            raise ValueError(f"no embedded model {path!r}: expected {', '.join(EMBEDDED_MODELS)}")
        return path

    @field_validator("storage")
    @classmethod
    def _of_a_url(cls, storage: dict[str, Any], info: Any) -> dict[str, Any]:
        if storage and not is_url(info.data.get("path", "://")):
            raise ValueError(f"only a url takes options; found {', '.join(sorted(storage))}; leave it out")
        return storage


class SpeculationSection(Section):
    """Who drafts (null: whoever is there), and how many tokens at most for a row in a step; only where it pays unless
    `forced`."""

    proposer: Literal["ngram", "draft"] | None = None
    max_draft_tokens: int = Field(default=6, ge=1, le=32)
    forced: Switch = False


def _kind_of_speculation(value: object) -> str:
    return UNION_TAGS[isinstance(value, dict | SpeculationSection)]


Speculation = Annotated[
    Annotated[Literal["off", "auto"], Tag(UNION_TAGS[0])] | Annotated[SpeculationSection, Tag(UNION_TAGS[1])],
    Discriminator(_kind_of_speculation),
]


class EngineSection(Section):
    """How the engine is built; `auto` and null are resolved from the checkpoint and the machine."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    block_size: int | None = Field(default=None, ge=1)
    enable_prefix_caching: Switch = True
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    kv_cache_memory_bytes: Bytes | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    activation_dtype: Literal["auto", "fp8", "int8"] = "auto"
    kernels: Literal["auto", "cpu", "triton", "reference"] = "auto"
    deterministic: Switch = False
    speculation: Annotated[Speculation, FALSE_IS_OFF] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**63)


class SamplingSection(Section):
    """SamplingParams' fields; all but `seed` and `logprobs` may be `{column: name}`, each row's own value."""

    max_tokens: IntOrColumn = 16
    min_tokens: IntOrColumn = 0
    temperature: NumberOrColumn = 0.0
    top_k: IntOrColumn = 0
    top_p: NumberOrColumn = 1.0
    min_p: NumberOrColumn = 0.0
    repetition_penalty: NumberOrColumn = 1.0
    presence_penalty: NumberOrColumn = 0.0
    frequency_penalty: NumberOrColumn = 0.0
    stop: StringsOrColumn = ()
    stop_token_ids: TokenIdsOrColumn = ()
    ignore_eos: SwitchOrColumn = False
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    logprobs: int | None = None

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any, info: Any) -> Any:
        """Each value alone against SamplingParams' own checks, so that all mistakes are seen at once."""
        if not isinstance(value, FromColumn):
            name = info.field_name
            given = {name: value}
            if name == "min_tokens":
                given["max_tokens"] = max(value, 16)
            try:
                SamplingParams(**given)
            except ConfigError as error:
                raise ValueError(f"{error.problem(f'sampling.{name} = {value!r}')}; got {value!r}") from None
        return value

    @model_validator(mode="after")
    def _min_under_max(self) -> "SamplingSection":
        low, high = self.min_tokens, self.max_tokens
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise ValueError(f"min_tokens {low} is more than max_tokens {high}")
        return self


class OutputSection(Section):
    """Where the parts go. `rename` gives result columns another name."""

    path: Place
    rename: dict[str, str] = {}
    storage: dict[str, Any] = Field(default={}, repr=False)

    @field_validator("rename")
    @classmethod
    def _names_differ(cls, rename: dict[str, str]) -> dict[str, str]:
        if any(not new for new in rename.values()):
            raise ValueError("a new name must not be empty")
        if len(set(rename.values())) < len(rename):
            raise ValueError("two columns get the same new name")
        return rename


class RunSection(Section):
    """How the work is cut and run. `gpus_per_actor` null means 0 on cpu and 1 on cuda."""

    actors: int = Field(default=1, ge=1, le=100_000)
    cpus_per_actor: float | None = Field(default=None, gt=0)
    gpus_per_actor: float | None = Field(default=None, ge=0)
    window_rows: int = Field(default=65_536, ge=1)
    window_bytes: Bytes = 256 * 2**20
    unit_tokens: int = Field(default=100_000, ge=1)
    unit_rows: int = Field(default=512, ge=1)
    units_in_flight: int = Field(default=4, ge=1)
    max_error_rate: float = Field(default=0.01, ge=0, le=1)
    drain_s: float = Field(default=30.0, ge=0, le=86_400)
    step_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    load_timeout_s: float = Field(default=3600.0, gt=0, le=604_800)
    progress_timeout_s: float = Field(default=1800.0, gt=0, le=604_800)
    spot_notice: Annotated[Literal["off", "aws", "gcp", "azure"], FALSE_IS_OFF] = "off"
    ray_address: str | None = None


class CostSection(Section):
    """`hourly_usd` is what one actor's machine (or its share of one) costs for an hour; null: unpriced."""

    hourly_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
