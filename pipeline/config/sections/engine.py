"""The section `engine`. Left out, values are those of the engine for the device."""

from typing import Literal

from pydantic import Field

from pipeline.config.values import IDENTITY, NUMERICS, Bytes, Section, Switch


class EngineSection(Section):
    """How the engine is built; `auto` and null are resolved from the checkpoint and the machine."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="Where the model runs: auto, cpu, cuda or cuda:N.",
        examples=["cuda"],
        json_schema_extra=NUMERICS,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="The type that is computed in; auto: what fits the checkpoint and the device.",
        examples=["bfloat16"],
        json_schema_extra=NUMERICS,
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="The most tokens of a prompt and its completion together. When left out the model's own context, "
        "or what the KV cache holds if that is less.",
        examples=[4096],
        json_schema_extra=IDENTITY,
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="The most rows that are computed at once. Chosen for the machine when left out.",
        examples=[256],
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="The most tokens computed in one step. Chosen for the machine when left out.",
        examples=[8192],
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="The share of a GPU's memory that the engine may use, from 0 to 1.",
        examples=[0.85],
    )
    kv_cache_memory_bytes: Bytes | None = Field(
        default=None,
        description="Size of the KV cache in bytes. When left out what gpu_memory_utilization leaves; on CPU what "
        "max_num_seqs rows can need, at most a quarter of the free memory.",
        examples=["8 GiB"],
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="fp8 stores keys and values in 8 bits, about half the memory of 16 bit. It can change tokens.",
        examples=["fp8"],
        json_schema_extra=NUMERICS,
    )
    activation_dtype: Literal["auto", "fp8", "fp8-per-token", "int8"] = Field(
        default="auto",
        description="Rounds the inputs of quantized linears, for speed: int8 on processors, fp8 on GPUs. fp8-per-token "
        "is faster from about 200 tokens a step on, and rounds weights too. It can change tokens.",
        examples=["int8"],
        json_schema_extra=NUMERICS,
    )
    deterministic: Switch = Field(
        default=False,
        description="A row's tokens never depend on what it is computed with. Slower; on CPU in float32 only.",
        examples=[True],
        json_schema_extra=NUMERICS,
    )
