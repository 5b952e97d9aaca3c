"""Section `engine`."""

from typing import Literal

from pydantic import Field

from pipeline.config.values import IDENTITY, NUMERICS, Bytes, ConfigSection, Switch


class EngineSection(ConfigSection):
    """Engine settings; `auto` and null are resolved from the checkpoint and the machine."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="Device of the model: auto, cpu, cuda or cuda:N.",
        examples=["cuda"],
        json_schema_extra=NUMERICS,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Compute dtype; auto: chosen for the checkpoint and the device.",
        examples=["bfloat16"],
        json_schema_extra=NUMERICS,
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of a prompt and its completion together. Default: the model's context length, or "
        "the capacity of the KV cache if that is smaller.",
        examples=[4096],
        json_schema_extra=IDENTITY,
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Maximum rows computed at once. Default: chosen for the machine; 1024 for a server.",
        examples=[256],
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens computed in one step. Default: chosen for the machine.",
        examples=[8192],
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Fraction of the GPU's memory that the engine may use, from 0 to 1.",
        examples=[0.85],
    )
    kv_cache_memory_bytes: Bytes | None = Field(
        default=None,
        description="Size of the KV cache in bytes. Default: the rest of gpu_memory_utilization; on CPU enough for "
        "max_num_seqs rows, at most a quarter of the free memory.",
        examples=["8 GiB"],
    )
    cpu_offload_gb: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="GB of each GPU's weights of layers to keep in host memory, rounded up to whole layers. Each step "
        "copies them to the GPU while other layers compute.",
        examples=[8],
    )
    kv_cache_dtype: Literal["auto", "none", "fp8"] = Field(
        default="auto",
        description="fp8 stores keys and values in 8 bits, in about half the memory of 16 bit. Can change tokens. auto "
        "is fp8 if the checkpoint declares it; none is engine.dtype.",
        examples=["fp8"],
        json_schema_extra=NUMERICS,
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the states of Gated DeltaNet layers (Qwen3.5). bfloat16 halves their memory; each step "
        "rounds them. Can change tokens.",
        examples=["bfloat16"],
        json_schema_extra=NUMERICS,
    )
    activation_dtype: Literal["auto", "none", "fp8", "int8"] = Field(
        default="auto",
        description="Quantize the inputs of quantized linears for speed: int8 on CPUs, fp8 on GPUs. fp8 also rounds "
        "weights that are not stored in fp8. Can change tokens. auto is what the checkpoint declares, where the device "
        "multiplies it; none is engine.dtype.",
        examples=["int8"],
        json_schema_extra=NUMERICS,
    )
    deterministic: Switch = Field(
        default=False,
        description="Make a row's tokens independent of the batch that it runs in. Slower; on CPU float32 only.",
        examples=[True],
        json_schema_extra=NUMERICS,
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs of one engine, which compute each step together, each with a share of the weights; for a "
        "model larger than one card. Changes rounding.",
        examples=[4],
        json_schema_extra=NUMERICS,
    )
