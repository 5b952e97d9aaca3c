"""The section `output`: where results go, under which names."""

from typing import Any, Literal

from pydantic import Field, field_validator

from pipeline.config.sections.section import Section
from pipeline.config.values import Place


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
