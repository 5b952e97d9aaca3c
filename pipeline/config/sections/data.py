"""Sections `input` and `output`."""

from typing import Literal

from pydantic import Field, field_validator

from pipeline.config.values import IDENTITY, Columns, ConditionText, ConfigSection, PathOrUrl
from pipeline.data.conditions import Condition


class InputSection(ConfigSection):
    """Input data. `columns` None keeps every column in the output, an empty list keeps none."""

    path: PathOrUrl = Field(
        description="Parquet, JSON Lines (.jsonl, .ndjson, .json), CSV or TSV (these also .gz or .zst), or Arrow "
        "(.arrow, .feather, .ipc), one format per job: a file, a folder (with subfolders) or a glob, local or an "
        "fsspec url, such as s3:// or hf://datasets/. Relative paths start at the working directory; "
        "paths may contain ${NAME} and ${NAME:-default} for environment variables.",
        examples=[
            "jobs/data",
            "s3://bucket/tickets/*.parquet",
            "chats.jsonl.gz",
            "tickets.csv",
            "hf://datasets/org/name/data/train-*",
            "${DATA:-data}/in",
        ],
    )
    format: Literal["rows", "openai", "pdf"] = Field(
        default="rows",
        description="rows: columns, used by prompt and sampling. openai: lines of OpenAI's Batch API with their own "
        "prompt and sampling, for /v1/chat/completions, /v1/completions or, with task: embed, /v1/embeddings. pdf: "
        "pages of .pdf files, with the columns page, an image for prompt.images, and source_page, its number from 1.",
        examples=["openai"],
        json_schema_extra=IDENTITY,
    )
    columns: Columns | None = Field(
        default=None,
        description="Input columns to keep next to each completion; an empty list keeps none. Default: all but "
        "prompt.images (format openai: custom_id, and encoding_format of embeddings).",
        examples=[["ticket_id"]],
        json_schema_extra=IDENTITY,
    )
    on_corrupt: Literal["fail", "skip"] = Field(
        default="fail",
        description="fail: damaged files stop the job. skip: damaged files are left out and listed; damaged row "
        "groups, lines that are not JSON objects and rows of CSV that do not fit the header become error rows.",
        examples=["skip"],
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Number of rows to read, from the first. Default: all.",
        examples=[100],
        json_schema_extra=IDENTITY,
    )
    when: ConditionText | None = Field(
        default=None,
        description="Condition over the input's columns. Rows that do not meet it are not computed: they stay in the "
        "output without results, with dropped_by: input.when. Default: compute all rows.",
        examples=["lang = 'de' and (score > 0.5 or reviewed)", "text is not null"],
        json_schema_extra=IDENTITY,
    )

    @property
    def condition(self) -> Condition | None:
        """`when`, parsed."""
        return None if self.when is None else Condition.parse(self.when, "input.when")

    @property
    def has_requests(self) -> bool:
        """Return whether rows are requests of OpenAI's Batch API."""
        return self.format == "openai"


class OutputSection(ConfigSection):
    """Folder, parts and columns of the output."""

    path: PathOrUrl = Field(
        description="Folder for results, local or an fsspec url: part-*.parquet, _SUCCESS and _pipeline/.",
        examples=["out/summarize", "s3://bucket/labels"],
    )
    samples_as: Literal["lists", "rows"] = Field(
        default="lists",
        serialization_alias="samples",
        description="How to write several completions of a row (sampling.n): as lists in one row, or as separate rows "
        "with the kept columns and a sample_index, from 0.",
        examples=["rows"],
        json_schema_extra=IDENTITY,
    )
    rename: dict[str, str] = Field(
        default={},
        description="New names of result columns, old to new.",
        examples=[{"generated_text": "label"}],
        json_schema_extra={**IDENTITY, "additionalProperties": {"type": "string", "minLength": 1}},
    )
    rows_per_file: int = Field(
        default=512,
        ge=1,
        description="Maximum rows of a part file. A part is also the unit of work: a kill loses the units in flight.",
        examples=[256],
        json_schema_extra=IDENTITY,
    )
    accept: ConditionText | None = Field(
        default=None,
        description="Condition over the output's columns. Completed rows that do not meet it get dropped_by: "
        "output.accept and keep their results; readers filter by dropped_by. Default: accept all rows.",
        examples=["finish_reason = 'stop'", "label_probability > 0.7"],
        json_schema_extra=IDENTITY,
    )

    @property
    def condition(self) -> Condition | None:
        """`accept`, parsed."""
        return None if self.accept is None else Condition.parse(self.accept, "output.accept")

    @field_validator("rename")
    @classmethod
    def _names_differ(cls, rename: dict[str, str]) -> dict[str, str]:
        if any(not new for new in rename.values()):
            raise ValueError("a new name must not be empty")
        if len(set(rename.values())) < len(rename):
            raise ValueError("two columns get the same new name")
        return rename
