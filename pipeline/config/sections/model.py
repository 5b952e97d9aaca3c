"""Section `model`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.checkpoints.locate import EMBEDDED_MODELS
from pipeline.config.values import NUMERICS, ConfigSection, ModelPath
from pipeline.stores.filesystem import is_url


class ModelSection(ConfigSection):
    """Checkpoint and its quantization on load, which does not affect a draft model."""

    path: ModelPath = Field(
        description="Checkpoint: a folder, an fsspec url, a Hugging Face id, or an embedded one: demo:target-awq.",
        examples=["Qwen/Qwen3-4B", "models/Llama-3.1-8B-Instruct"],
    )
    quantization: Literal["none", "int8", "int4-rtn", "nf4"] = Field(
        default="none",
        description="Quantize the linears of a 16- or 32-bit checkpoint on load; not for quantized checkpoints.",
        examples=["int8"],
        json_schema_extra=NUMERICS,
    )
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Branch, tag or commit of a Hugging Face id. Default: the main branch.",
        examples=["v1.1", "1cfa9a7208912126459214e8b04321603b3df60c"],
    )

    @field_validator("revision")
    @classmethod
    def _of_an_id(cls, revision: str | None, info: Any) -> str | None:
        path = info.data.get("path", "owner/name")
        if revision is not None and (is_url(path) or path in EMBEDDED_MODELS):
            raise ValueError("only a Hugging Face id has revisions; leave it out")
        return revision
