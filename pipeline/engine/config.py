"""Configuration of an engine, and the checks of its options. `startup/resolve.py` resolves `auto` values."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.option_checks import check_options, is_finite, is_int
from pipeline.engine.speculation.config import SpeculationConfig, SpeculationMethod


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine. `None` and "auto" are resolved from the checkpoint and the machine.

    model: folder with config.json, safetensors and tokenizer files (a text or a Path), a GGUF file, or a Hugging Face
    id.
    device: "auto", "cpu", "cuda" or "cuda:N". dtype: "auto", "bfloat16", "float16" or "float32".
    max_num_seqs: maximum running sequences. max_num_batched_tokens: maximum tokens of one step. The defaults are in
    `startup/batch_limits.py`.
    block_size: tokens of one KV block. kv_cache_memory_bytes: size of the KV cache; on CPU it defaults to what
    max_num_seqs sequences of max_model_len tokens need, at most a quarter of the free memory.
    cpu_offload_gb: GB (10^9 bytes) of each GPU's weights of layers to keep in host memory, rounded up to whole layers;
    each step copies them to the GPU, see `pipeline/model/offload.py`. The draft model's weights stay on the GPU.
    kv_cache_dtype: "none" is the compute dtype, "fp8" 8 bits and a scale for each token and KV head, also in the draft
    model's cache (see kernels/cache.py); "auto" is "fp8" if the checkpoint declares it, else "none".
    state_dtype: "float32" or "bfloat16", of the states of Gated DeltaNet layers (see kernels/delta_net.py).
    kernels: "auto", "cpu" (numba, oneDNN), "triton" (NVIDIA GPUs) or "reference" (plain torch, slow).
    activation_dtype: "none" is `dtype`; "fp8" rounds the inputs of quantized linears to float8_e4m3fn, and weights that
    are not stored in it, which can change tokens (see `kernels/activations/fp8.py`): it is faster on NVIDIA GPUs from
    compute capability 8.9 and slower elsewhere, where it only serves to check its effect on outputs. "int8" rounds
    those of 4- and 8-bit integer linears (see `kernels/activations/int8.py`): it is faster on processors with AVX2.
    "auto" rounds to fp8 or int8 if the checkpoint declares it, the device multiplies it, and `deterministic` is off.
    deterministic: a row's logits, and so its tokens, are bitwise equal whatever else is in a step, however its prompt
    is chunked, shared or recomputed, and whether drafts were verified. Slower; on CPU in float32 only. See
    `kernels/triton/batch_invariant.py` and `kernels/cpu/invariant.py` for the cost. With a draft model fewer sampled
    drafts are accepted, because rejection sampling would make tokens depend on them.
    quantization: "fp8", "int8", "int4-rtn" or "nf4" quantizes the linears of a 16- or 32-bit checkpoint while loading,
    by rounding; "none" keeps the stored weights, quantized or not.
    speculation: a `SpeculationConfig`, its method alone ("off", or False), or a mapping of its fields.
    num_threads: CPU threads of this engine while it computes, at most one per processor; None: torch's current number.
    tensor_parallel_size: number of GPUs that compute each step together, each with a share of every layer; on a CPU,
    number of processes. See `engine/parallel/`. With `device` cuda:N they are cuda:N and the following ones. Sums are
    split, so rounding differs from that of one GPU. On GPUs this process ends if one of the others does.
    adapters: LoRA adapters that requests may use, by name: folders in PEFT's layout (texts or Paths), or Hugging Face
    ids. The draft model proposes without them.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    cpu_offload_gb: float = 0.0
    kv_cache_dtype: str = "auto"
    state_dtype: str = "float32"
    activation_dtype: str = "auto"
    kernels: str = "auto"
    deterministic: bool = False
    quantization: str = "none"
    speculation: SpeculationConfig | SpeculationMethod | bool | Mapping[str, Any] = "auto"
    seed: int = 0
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options that `startup/resolve.py` uses unchanged; it checks the others."""
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if isinstance(self.adapters, Mapping):
            paths = {name: os.fspath(p) if isinstance(p, os.PathLike) else p for name, p in self.adapters.items()}
            object.__setattr__(self, "adapters", paths)
        object.__setattr__(self, "speculation", SpeculationConfig.from_value(self.speculation))
        checks = [
            ("model", isinstance(self.model, str), "a folder or a Hugging Face id"),
            (
                "adapters",
                isinstance(self.adapters, Mapping)
                and all(isinstance(text, str) for pair in self.adapters.items() for text in pair),
                "a mapping of names to folders",
            ),
            ("device", isinstance(self.device, str), "auto, cpu, cuda or cuda:N"),
            ("enable_prefix_caching", isinstance(self.enable_prefix_caching, bool), "true or false"),
            ("deterministic", isinstance(self.deterministic, bool), "true or false"),
            ("gpu_memory_utilization", is_finite(self.gpu_memory_utilization), "a number in (0, 1]"),
            (
                "kv_cache_memory_bytes",
                self.kv_cache_memory_bytes is None or is_int(self.kv_cache_memory_bytes),
                "an integer of bytes, or none",
            ),
            ("cpu_offload_gb", is_finite(self.cpu_offload_gb) and self.cpu_offload_gb >= 0, "a number of at least 0"),
            ("seed", is_int(self.seed), "an integer"),
            ("num_threads", self.num_threads is None or is_int(self.num_threads), "an integer of at least 1, or none"),
            (
                "tensor_parallel_size",
                is_int(self.tensor_parallel_size) and self.tensor_parallel_size >= 1,
                "an integer of at least 1",
            ),
        ]
        check_options("engine", self, checks)

    @property
    def speculation_config(self) -> SpeculationConfig:
        """The value of `speculation` as a SpeculationConfig."""
        assert isinstance(self.speculation, SpeculationConfig)
        return self.speculation
