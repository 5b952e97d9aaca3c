"""The section `input`: what is read."""

from typing import Any, Literal

from pydantic import Field

from pipeline.config.sections.section import Section
from pipeline.config.values import Columns, Place


class InputSection(Section):
    """What is read. `columns` None keeps every column in the output, an empty list none."""

    path: Place = Field(
        description="Parquet or JSON Lines (.jsonl, .ndjson, .json; also .gz, .zst) to read: a file, a folder (with "
        "its subfolders) or a glob, local or any fsspec url. One format in a job. Relative paths are below the working "
        "directory; ${NAME} and ${NAME:-default} are environment variables, here and in the other paths.",
        examples=["jobs/data", "s3://bucket/tickets/*.parquet", "chats.jsonl.gz", "${DATA:-data}/in"],
    )
    format: Literal["columns", "openai-batch"] = Field(
        default="columns",
        description="What a row is: columns, of which prompt and sampling name some; or a line of a batch API, which "
        "says prompt and sampling itself: openai-batch for /v1/chat/completions, /v1/completions or, with task: embed, "
        "/v1/embeddings.",
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
    def has_requests(self) -> bool:
        """Return whether rows are requests of a batch API."""
        return self.format != "columns"
