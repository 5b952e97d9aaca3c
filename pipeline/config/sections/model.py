"""The section `model`: which checkpoint answers."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.checkpoints.locate import EMBEDDED_MODELS
from pipeline.config.sections.section import Section
from pipeline.config.values import ModelPlace
from pipeline.stores.filesystem import is_url


class ModelSection(Section):
    """Which checkpoint: a folder, an fsspec url such as s3://, a Hugging Face id, or one of EMBEDDED_MODELS.

    `quantization` makes the linears of a 16- or 32-bit checkpoint smaller while it is loaded; a draft model stays as it
    is.
    """

    path: ModelPlace = Field(
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
