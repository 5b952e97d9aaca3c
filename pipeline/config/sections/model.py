"""Section `model`."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from pipeline.checkpoints.locate import EMBEDDED_MODELS
from pipeline.config.values import IDENTITY, NUMERICS, AdapterPath, ConfigSection, ModelPath, PerRow
from pipeline.stores.filesystem import is_url

AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


class ModelSection(ConfigSection):
    """Checkpoint, its quantization on load, and its adapters. Neither affects a draft model."""

    path: ModelPath = Field(
        description="Checkpoint: a folder, a GGUF file, an fsspec url or a Hugging Face id of either, or an embedded "
        "one: demo:target-awq.",
        examples=["Qwen/Qwen3-4B", "models/Llama-3.1-8B-Instruct", "models/Qwen3-4B-Q4_K_M.gguf"],
    )
    quantization: Literal["none", "fp8", "int8", "int4-rtn", "nf4"] = Field(
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

    adapters: dict[AdapterName, AdapterPath] = Field(
        default={},
        description="LoRA adapters by name, in PEFT's layout: folders, fsspec urls, Hugging Face ids, or an embedded "
        "one: demo:short.",
        examples=[{"formal": "adapters/formal", "short": "adapters/short"}],
    )
    adapter: PerRow[AdapterName] | None = Field(
        default=None,
        description="Adapter of all rows, a name from `adapters`; or {column: name}, a column of such names, where "
        "null is the base model. Default: the base model.",
        examples=["formal", {"column": "style"}],
        json_schema_extra=IDENTITY,
    )

    @property
    def used_adapters(self) -> dict[str, str]:
        """Paths of the adapters that rows may use, by name."""
        if isinstance(self.adapter, str):
            return {self.adapter: self.adapters[self.adapter]}
        return {} if self.adapter is None else self.adapters

    @field_validator("revision")
    @classmethod
    def _of_an_id(cls, revision: str | None, info: Any) -> str | None:
        path = info.data.get("path", "owner/name")
        if revision is not None and (is_url(path) or path in EMBEDDED_MODELS):
            raise ValueError("only a Hugging Face id has revisions; leave it out")
        return revision
