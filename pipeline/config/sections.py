"""The sections of a job file: every key with its type, range and default, what it means and an example.

Values alone are checked here, and keys of one section against each other. Whether the columns, the model
and the output are there is found out later, by the job.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from pipeline.checkpoints.locate import EMBEDDED_MODELS
from pipeline.config.values import (
    UNION_TAGS,
    Bytes,
    Column,
    Columns,
    Duration,
    Moment,
    Place,
    Switch,
    false_is_off,
)
from pipeline.errors import ConfigError
from pipeline.stores.filesystem import is_url

if TYPE_CHECKING:
    from pipeline.data.prompts import PromptSpec
    from pipeline.data.requests.input_checks import RequestFormat


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class InputSection(Section):
    """What is read. `columns` None keeps every column in the output, an empty list none."""

    path: Place = Field(
        description="Parquet or JSON Lines (.jsonl, .ndjson, .json; also .gz, .zst) to read: a file, a folder (with "
        "its subfolders) or a glob, local or any fsspec url. One format in a job. Relative paths are below the working "
        "directory; ${NAME} and ${NAME:-default} are environment variables, here and in the other paths.",
        examples=["jobs/data", "s3://bucket/tickets/*.parquet", "chats.jsonl.gz", "${DATA:-data}/in"],
    )
    format: Literal["columns", "openai-batch", "anthropic-batch", "bedrock-batch"] = Field(
        default="columns",
        description="What a row is: columns, of which prompt and sampling name some; or a line of a batch API, which "
        "says prompt and sampling itself: openai-batch for /v1/chat/completions, /v1/completions or, with task: embed, "
        "/v1/embeddings; anthropic-batch for Anthropic's messages; bedrock-batch for Amazon's Converse, or InvokeModel "
        "of Llama models.",
        examples=["openai-batch"],
    )
    columns: Columns | None = Field(
        default=None,
        description="Input columns kept beside each completion. All when left out (of lines of a batch API: "
        "custom_id, and encoding_format of embeddings), none for an empty list.",
        examples=[["ticket_id"]],
    )
    on_corrupt: Literal["fail", "skip"] = Field(
        default="fail",
        description="Of damaged files: stop the job, or leave them out and list them; damaged row groups, and "
        "lines that are no JSON objects, become error rows.",
        examples=["skip"],
    )
    storage: dict[str, Any] = Field(
        default={},
        repr=False,
        description="fsspec options of the url, such as a profile or an endpoint; left out, the environment's. "
        "Never shown.",
        examples=[{"profile": "research"}],
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Only the first so many rows. All when left out.",
        examples=[100],
    )

    @property
    def requests(self) -> "RequestFormat | None":
        """The format of the lines, where these are requests of a batch API."""
        return None if self.format == "columns" else self.format


class ChatSection(Section):
    """How a prompt becomes a chat for a template.

    `date` is what a template that asks for the date is told; null: the local time of the output's first run.
    """

    system: str | None = Field(
        default=None,
        description="The system message, before the prompt.",
        examples=["Answer with one word."],
    )
    template: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="A file with a chat template (Jinja) that is taken instead of the model's own. The model's when "
        "left out.",
        examples=["templates/llama3-tools.jinja"],
    )
    add_generation_prompt: Switch = Field(
        default=True,
        description="End the chat where the assistant's turn begins.",
        examples=[False],
    )
    continue_final_message: Switch = Field(
        default=True,
        description="A chat that ends with the assistant's message is continued: the prompt ends with its text, and "
        "the completion is what follows. false: the turn is closed, and the assistant begins another one.",
        examples=[False],
    )
    template_kwargs: dict[str, Any] = Field(
        default={},
        description="What the chat template knows besides.",
        examples=[{"enable_thinking": False}],
    )
    date: Moment | None = Field(
        default=None,
        description="The date that a chat template is told, without a time zone. Left out, the local time of "
        "the output's first run.",
        examples=["2026-11-23", "2026-11-23 14:05"],
    )


class PromptSection(Section):
    """Where a row's prompt comes from: exactly one of `template`, `column` and `messages`. Where the lines of the input
    are requests, these say it, and a job file gives none (`requests.py`).

    `chat` None sends the text as it is; `messages` always goes through the chat template.
    """

    template: str | None = Field(
        default=None,
        min_length=1,
        description="Text with {column} for the columns of each row, {column.field} for a field of a struct or of JSON "
        "text, {column:.2f} for a number or date in a form; {{ and }} stand for braces. Or give `column`, or "
        "`messages`.",
        examples=["Summarize: {text}", "{author.name} ({score:.1f}): {text}"],
    )
    column: Column | None = Field(
        default=None,
        description="A column of text that is the prompt as it is.",
        examples=["text"],
    )
    messages: Column | None = Field(
        default=None,
        description="A column of chats: lists of role and content, or their JSON.",
        examples=["turns"],
    )
    chat: ChatSection | None = Field(
        default=None,
        description="Put the prompt through the model's chat template, as the user's turn. Left out, "
        "`template` and `column` are sent as plain text.",
        examples=[{"system": "Answer with one word."}, True],
    )
    defaults: dict[str, str] = Field(
        default={},
        description="Texts that stand for nulls: by what the template names, or by the column. A null without one "
        "makes the row an error row.",
        examples=[{"title": "(untitled)", "author.name": "unknown"}],
    )
    max_bytes: Bytes = Field(
        default=8 * 2**20,
        description="Prompts of more bytes (UTF-8) become error rows before they are tokenized. 8 MiB when left out.",
        examples=["64 KiB"],
    )

    @field_validator("chat", mode="before", json_schema_input_type=ChatSection | bool | None)
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
        if self.defaults:
            try:
                self.spec()
            except ConfigError as error:
                raise ValueError(f"defaults: {error.problem('prompt.defaults')}") from None
        return self

    def spec(self) -> "PromptSpec":
        """How rows become prompts."""
        from pipeline.data.prompts import PromptSpec

        return PromptSpec(self.column, self.template, self.messages, self.max_bytes, self.defaults)


class ModelSection(Section):
    """Which checkpoint: a folder, an fsspec url such as s3://, a Hugging Face id, or one of EMBEDDED_MODELS.

    `draft` is another one, smaller and with the same tokens, that proposes tokens for it to check. `quantization` makes
    the linears of a 16- or 32-bit checkpoint smaller while it is loaded; the draft model stays as it is.
    """

    path: Place = Field(
        description="The checkpoint: a folder, an fsspec url, a Hugging Face id, or an embedded one such as "
        "demo:target-awq.",
        examples=["Qwen/Qwen3-4B", "models/Llama-3.1-8B-Instruct"],
    )
    storage: dict[str, Any] = Field(
        default={},
        repr=False,
        description="fsspec options of the url, such as a profile or an endpoint; left out, the environment's. "
        "Never shown.",
        examples=[{"profile": "research"}],
    )
    draft: Place | None = Field(
        default=None,
        description="A smaller model with the same tokens, which proposes some where that is faster.",
        examples=["models/Qwen3-0.6B"],
    )
    quantization: Literal["none", "int8", "int4-rtn", "nf4"] = Field(
        default="none",
        description="Makes the linears of a 16- or 32-bit checkpoint smaller while it is loaded. A checkpoint "
        "that is quantized needs none.",
        examples=["int8"],
    )
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Of a Hugging Face id: the branch, tag or commit. The main branch when left out. The draft model's "
        "is always the main one.",
        examples=["v1.1", "1cfa9a7208912126459214e8b04321603b3df60c"],
    )
    trust: Literal["never"] = Field(
        default="never",
        description="Code from a checkpoint is never run.",
        examples=["never"],
    )

    @field_validator("path", "draft")
    @classmethod
    def _embedded_exists(cls, path: str | None) -> str | None:
        if path is not None and path.startswith("demo:") and path not in EMBEDDED_MODELS:
            raise ValueError(f"no embedded model {path!r}: expected {', '.join(EMBEDDED_MODELS)}")
        return path

    @field_validator("revision")
    @classmethod
    def _of_an_id(cls, revision: str | None, info: Any) -> str | None:
        path = info.data.get("path", "owner/name")
        if revision is not None and (is_url(path) or path in EMBEDDED_MODELS):
            raise ValueError("only a Hugging Face id has revisions; leave it out")
        return revision

    @field_validator("storage")
    @classmethod
    def _of_a_url(cls, storage: dict[str, Any], info: Any) -> dict[str, Any]:
        if storage and not is_url(info.data.get("path", "://")):
            raise ValueError(f"only a url takes options; found {', '.join(sorted(storage))}; leave it out")
        return storage


class OutputSection(Section):
    """Where the parts go. `rename` gives result columns another name."""

    path: Place = Field(
        description="The folder that results go to, local or any fsspec url: part-*.parquet, _SUCCESS and _pipeline/.",
        examples=["out/summarize", "s3://bucket/labels"],
    )
    samples: Literal["lists", "rows"] = Field(
        default="lists",
        description="How several completions of a row (sampling.n) stand: in lists in one row, or as rows of their own "
        "with the row's kept columns and a sample_index, from 0.",
        examples=["rows"],
    )
    rename: dict[str, str] = Field(
        default={},
        description="Other names for result columns, old to new.",
        examples=[{"generated_text": "label"}],
        json_schema_extra={"additionalProperties": {"type": "string", "minLength": 1}},
    )
    storage: dict[str, Any] = Field(
        default={},
        repr=False,
        description="fsspec options of the url, such as a profile or an endpoint; left out, the environment's. "
        "Never shown.",
        examples=[{"profile": "research"}],
    )

    @field_validator("rename")
    @classmethod
    def _names_differ(cls, rename: dict[str, str]) -> dict[str, str]:
        if any(not new for new in rename.values()):
            raise ValueError("a new name must not be empty")
        if len(set(rename.values())) < len(rename):
            raise ValueError("two columns get the same new name")
        return rename


class PoolSection(Section):
    """How many engines an elastic pool has."""

    min: int = Field(ge=1, le=100_000, description="Engines that the run starts with.", examples=[1])
    max: int = Field(ge=1, le=100_000, description="The most engines, where the cluster has room.", examples=[64])

    @model_validator(mode="after")
    def _in_order(self) -> "PoolSection":
        if self.max < self.min:
            raise ValueError(f"expected max to be at least min; got min {self.min} and max {self.max}")
        return self


def _kind_of_pool(value: object) -> str:
    return UNION_TAGS[isinstance(value, dict | PoolSection)]


class RunSection(Section):
    """How the work is cut and run. `gpus_per_actor` null means 0 on cpu and 1 on cuda."""

    actors: Annotated[
        Annotated[int, Field(ge=1, le=100_000), Tag(UNION_TAGS[0])] | Annotated[PoolSection, Tag(UNION_TAGS[1])],
        Discriminator(_kind_of_pool),
    ] = Field(
        default=1,
        description="Engines at once, each a copy of the model. With {min: 1, max: 64} engines start as machines join "
        "the cluster, and are given back as soon as no unit is left for them.",
        examples=[8, {"min": 1, "max": 64}],
    )
    cpus_per_actor: float | None = Field(
        default=None,
        gt=0,
        description="Processors that an engine reserves. Its share of the machine's when left out.",
        examples=[4],
    )
    gpus_per_actor: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that an engine reserves. 0 on cpu and 1 on cuda when left out.",
        examples=[1],
    )
    window_rows: int = Field(
        default=65_536,
        ge=1,
        description="The most rows that are read and sorted into units at a time.",
        examples=[65536],
    )
    window_bytes: Bytes = Field(
        default=256 * 2**20,
        description="About the most bytes that are read at a time. 256 MiB when left out.",
        examples=["64 MiB"],
    )
    unit_tokens: int = Field(
        default=100_000,
        ge=1,
        description="About the most tokens of a unit of work.",
        examples=[50000],
    )
    unit_rows: int = Field(
        default=512,
        ge=1,
        description="The most rows of a unit of work, which is a part file; a kill loses the units in flight.",
        examples=[256],
    )
    units_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Units that an engine works on at once. Left out, four, or as many as fill its batch where units "
        "are cut into few rows because each may generate many tokens.",
        examples=[8],
    )
    max_error_rate: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="A larger share of error rows stops the job, resumably. From 0 to 1.",
        examples=[0.001],
    )
    drain_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="After a stop signal or a spot notice: seconds to finish what is open.",
        examples=[60],
    )
    step_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="An engine that ends no step for so many seconds is started again.",
        examples=[600],
    )
    load_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        le=604_800,
        description="An engine that says nothing for so many seconds while it loads is started again.",
        examples=[7200],
    )
    progress_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        le=604_800,
        description="A run in which nothing moves for so many seconds ends with exit code 3.",
        examples=[3600],
    )
    max_runtime: Duration | None = Field(
        default=None,
        description="A run ends itself in time to be over after so long, resumably, with exit code 75.",
        examples=["6 h"],
    )
    quality_sample: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The share of rows that are compared with a reference model while the job runs (section quality). "
        "From 0 to 1; 0 is off.",
        examples=[0.001],
    )
    spot_notice: Annotated[
        Literal["off", "aws", "gcp", "azure"], false_is_off(Literal["off", "aws", "gcp", "azure"])
    ] = Field(
        default="off",
        description="Whose metadata service is asked whether a spot machine is about to go.",
        examples=["aws"],
    )
    ray: Literal["auto", "always"] = Field(
        default="auto",
        description="auto: where one engine on this machine computes one window, the job runs without Ray, whose "
        "start takes some seconds. always: every job runs with it.",
        examples=["always"],
    )
    ray_address: str | None = Field(
        default=None,
        description="A Ray cluster to run on. Ray is started on this machine when left out.",
        examples=["auto"],
    )

    metrics_address: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.\-\[\]:]+:[0-9]{1,5}$")] | None = Field(
        default=None,
        description="Where the driver shows /metrics to Prometheus, and /healthz: host:port. Nowhere when left out.",
        examples=["0.0.0.0:9400"],
    )

    @property
    def pool(self) -> tuple[int, int]:
        """The fewest and the most engines."""
        return (self.actors, self.actors) if isinstance(self.actors, int) else (self.actors.min, self.actors.max)


class TodaySection(Section):
    """A parameter that is the date of the day on which the run begins."""

    today: str = Field(description="The time zone whose date it is.", examples=["Europe/Berlin"])


class CostSection(Section):
    """`hourly_usd` is what one actor's machine (or its share of one) costs for an hour; null: unpriced."""

    hourly_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="What one actor's machine, or its share of one, costs for an hour, in US dollars. Unpriced "
        "when left out.",
        examples=[2.5],
    )
    budget_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="What the job may cost over all its runs, in US dollars. A run ends itself in time to stay below, "
        "resumably, with exit code 75; with a higher budget the same command goes on. Needs hourly_usd.",
        examples=[40],
    )

    @model_validator(mode="after")
    def _budget_has_a_price(self) -> "CostSection":
        if self.budget_usd is not None and self.hourly_usd is None:
            raise ValueError("expected hourly_usd beside budget_usd: a budget is counted in machine time at that price")
        return self
