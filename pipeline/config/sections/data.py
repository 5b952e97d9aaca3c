"""The sections `input` and `output`: what is read, and where results go."""

from typing import Literal

from pydantic import Field, field_validator

from pipeline.config.values import IDENTITY, Columns, Place, Section


class InputSection(Section):
    """What is read. `columns` None keeps every column in the output, an empty list none."""

    path: Place = Field(
        description="Parquet or JSON Lines (.jsonl, .ndjson, .json; also .gz, .zst) to read: a file, a folder (with "
        "its subfolders) or a glob, local or any fsspec url. One format in a job. Relative paths are below the working "
        "directory; ${NAME} and ${NAME:-default} are environment variables, here and in the other paths.",
        examples=["jobs/data", "s3://bucket/tickets/*.parquet", "chats.jsonl.gz", "${DATA:-data}/in"],
    )
    format: Literal["rows", "openai"] = Field(
        default="rows",
        description="rows: columns, of which prompt and sampling name some. openai: lines of OpenAI's Batch API, which "
        "hold prompt and sampling themselves, for /v1/chat/completions, /v1/completions or, with task: embed, "
        "/v1/embeddings.",
        examples=["openai"],
        json_schema_extra=IDENTITY,
    )
    columns: Columns | None = Field(
        default=None,
        description="Input columns kept next to each completion. All when left out (of format openai: custom_id, and "
        "encoding_format of embeddings), none for an empty list.",
        examples=[["ticket_id"]],
        json_schema_extra=IDENTITY,
    )
    on_corrupt: Literal["fail", "skip"] = Field(
        default="fail",
        description="Damaged files stop the job (fail), or are left out and listed (skip); damaged row groups, and "
        "lines that are no JSON objects, become error rows then.",
        examples=["skip"],
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="The number of rows to read, from the first. All when left out.",
        examples=[100],
        json_schema_extra=IDENTITY,
    )

    @property
    def has_requests(self) -> bool:
        """Return whether rows are requests of OpenAI's Batch API."""
        return self.format == "openai"


class OutputSection(Section):
    """Where the parts go. `rename` gives result columns another name."""

    path: Place = Field(
        description="The folder that results go to, local or any fsspec url: part-*.parquet, _SUCCESS and _pipeline/.",
        examples=["out/summarize", "s3://bucket/labels"],
    )
    samples: Literal["lists", "rows"] = Field(
        default="lists",
        description="How several completions of a row (sampling.n) are written: as lists in one row, or as rows of "
        "their own with the row's kept columns and a sample_index, from 0.",
        examples=["rows"],
        json_schema_extra=IDENTITY,
    )
    rename: dict[str, str] = Field(
        default={},
        description="Other names for result columns, old to new.",
        examples=[{"generated_text": "label"}],
        json_schema_extra={**IDENTITY, "additionalProperties": {"type": "string", "minLength": 1}},
    )
    rows_per_file: int = Field(
        default=512,
        ge=1,
        description="The most rows of a part file, which is also the unit of work: a kill loses the units in flight.",
        examples=[256],
        json_schema_extra=IDENTITY,
    )

    @field_validator("rename")
    @classmethod
    def _names_differ(cls, rename: dict[str, str]) -> dict[str, str]:
        if any(not new for new in rename.values()):
            raise ValueError("a new name must not be empty")
        if len(set(rename.values())) < len(rename):
            raise ValueError("two columns get the same new name")
        return rename
