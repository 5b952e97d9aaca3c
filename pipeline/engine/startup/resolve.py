"""Resolves the "auto" values of an `EngineConfig` to the settings of an engine."""

from dataclasses import dataclass, replace

import torch

from pipeline.engine.config import EngineConfig
from pipeline.engine.drafts.spec_decoder import MAX_CHECKED_TOKENS
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.engine.startup.batch_limits import BLOCK_SIZES, CPU_LIMITS, MIN_BLOCK_SIZE, BatchLimits, gpu_limits
from pipeline.engine.startup.memory import (
    OffloadPlan,
    free_cpu_bytes,
    layer_bytes_on_gpu,
    num_snapshots,
    offload_plan,
    weight_bytes,
)
from pipeline.errors import ConfigError
from pipeline.formatting import shown_bytes
from pipeline.kernels.activations.act_quant import (
    ACT_QUANT_SCHEMES,
    NOT_ROUNDED,
    Activations,
    resolve_activations,
)
from pipeline.kernels.cache import FP8
from pipeline.kernels.delta_shape import STATE_DTYPES
from pipeline.kernels.select import default_dtype, native_activations
from pipeline.machine.device import find_device
from pipeline.machine.numba import numba_unavailable_reason
from pipeline.model.config import DTYPES, ModelConfig
from pipeline.model.kv_cache import shared_kv_pages, single_kv_pages
from pipeline.roofline.kv_pages import KVPages
from pipeline.weights.round_to_nearest import METHODS, RoundToNearest

KV_CACHE_DTYPES = ("auto", "none", "fp8")
ACTIVATION_DTYPES = ("auto", "none", *ACT_QUANT_SCHEMES)


@dataclass(frozen=True)
class Resolved:
    """Resolved settings, except the size of the KV cache, which is known once the weights are loaded."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache: `dtype` or FP8
    kernels: str  # of kernels.select.KERNELS
    deterministic: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_pages: KVPages
    gpu_memory_utilization: float
    speculation: SpeculationConfig  # of method off, lookup or draft_model
    state_bytes: int = 0  # of a sequence, in layers that keep a state instead of keys and values; 0: there are none
    shares_prefixes: bool = True
    activations: Activations = NOT_ROUNDED  # of the target, not of its draft model
    offload: OffloadPlan | None = None  # of the target's layers

    @property
    def block_size(self) -> int:
        return self.kv_pages.block_size

    @property
    def num_snapshots(self) -> int:
        """States that are kept for the ends of shared prefixes, besides those of running sequences."""
        return num_snapshots(self.max_num_seqs) if self.state_bytes and self.shares_prefixes else 0

    @property
    def max_verified_tokens(self) -> int:
        """Maximum logit rows of a step in which every sequence decodes with the maximum number of drafts."""
        max_rows = min(self.max_num_seqs * (1 + self.max_drafts), self.max_num_batched_tokens, MAX_CHECKED_TOKENS)
        return max(self.max_num_seqs, max_rows)

    @property
    def max_drafts(self) -> int:
        """Maximum drafts of a sequence in a step."""
        return 0 if self.speculation.method == "off" else self.speculation.num_speculative_tokens


def resolve(config: EngineConfig, model: ModelConfig) -> Resolved:
    """Fill in the open options of `config`. Raises ConfigError for options that the machine or model lacks."""
    _check_supported(config)
    device = find_device(config.device)
    dtype = _dtype(config.dtype, device, model)
    activations = _activations(config, model, device)
    offload = _offload(config, layer_bytes_on_gpu(model, dtype, activations), device)
    limits = _default_limits(model, device, dtype, activations, offload)
    max_num_seqs = _positive("max_num_seqs", config.max_num_seqs, limits.max_num_seqs)
    batched = _positive("max_num_batched_tokens", config.max_num_batched_tokens, limits.max_num_batched_tokens)
    if config.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, batched)
    if config.max_num_batched_tokens is None:
        batched = max(batched, max_num_seqs)
    if batched < max_num_seqs:
        raise ConfigError(
            f"engine.max_num_batched_tokens = {batched}: expected at least engine.max_num_seqs = {max_num_seqs}, "
            "because each running sequence computes one token a step"
        )
    max_model_len = _positive("max_model_len", config.max_model_len, model.max_position)
    if max_model_len > model.max_position:
        raise ConfigError(
            f"engine.max_model_len = {max_model_len}: the model supports at most {model.max_position} positions"
        )
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model, dtype)
    if (state_bytes := model.state_bytes(dtype)) and config.deterministic:
        raise ConfigError("engine.deterministic: not supported for models with states (Gated DeltaNet); remove the key")
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kernels=config.kernels,
        deterministic=config.deterministic,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        kv_pages=resolve_kv_pages(config, model, kv_dtype, device.type, max_model_len),
        gpu_memory_utilization=config.gpu_memory_utilization,
        speculation=_speculation(config.speculation_config),
        state_bytes=state_bytes,
        shares_prefixes=config.enable_prefix_caching,
        activations=activations,
        offload=offload,
    )


def resolve_kv_pages(
    config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, device_type: str, max_model_len: int
) -> KVPages:
    """Return the pages of the target's KV cache. With a draft model, which follows the target's block table, all layers
    keep all tokens."""
    default = BLOCK_SIZES[device_type]
    size = _positive("block_size", config.block_size, default)
    if config.speculation_config.model is not None:
        return single_kv_pages(model, size, kv_dtype)
    pages = shared_kv_pages(model, size, kv_dtype, max_model_len)
    # Sequences share whole pages of a prefix.
    while config.block_size is None and pages.page_size > default and size > MIN_BLOCK_SIZE:
        size //= 2
        pages = shared_kv_pages(model, size, kv_dtype, max_model_len)
    return pages


def _offload(config: EngineConfig, layer_bytes: list[int], device: torch.device) -> OffloadPlan | None:
    gb = config.cpu_offload_gb
    if gb and device.type == "cpu":
        raise ConfigError(f"engine.cpu_offload_gb = {gb}: needs a GPU, and the engine runs on a CPU; remove the key")
    plan = offload_plan(layer_bytes, gb)
    if plan is None:
        return None
    host_bytes, free = config.tensor_parallel_size * plan.host_bytes, free_cpu_bytes()
    if host_bytes > free:
        raise ConfigError(
            f"engine.cpu_offload_gb = {gb}: {shown_bytes(host_bytes)} of weights do not fit the host's free memory of "
            f"{shown_bytes(free)}; lower the key"
        )
    return plan


def _default_limits(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, activations: Activations, offload: OffloadPlan | None
) -> BatchLimits:
    if device.type != "cuda":
        return CPU_LIMITS
    properties = torch.cuda.get_device_properties(device)
    weights = weight_bytes(model, device, dtype, keeps_dense=False, activations=activations)
    weights -= 0 if offload is None else offload.freed_bytes
    return gpu_limits(properties.total_memory, (properties.major, properties.minor), weights)


def quantized_on_load(model: ModelConfig, method: str) -> ModelConfig:
    """Return the model with its linears quantized by `method` on load. Raises ConfigError if that is not possible."""
    if method == "none":
        return model
    if method not in METHODS:
        raise ConfigError(f"model.quantization = {method!r}: expected none, {', '.join(METHODS)}")
    if model.quantization is not None:
        raise ConfigError(
            f"model.quantization = {method!r}: this checkpoint is quantized already ({model.quantization}); remove the "
            "key, or use the 16-bit checkpoint"
        )
    return replace(model, quantization=RoundToNearest(method))


def with_state_dtype(model: ModelConfig, name: str) -> ModelConfig:
    """Return the model with states of this type. Raises ConfigError if it keeps none, or for an unknown type."""
    if name not in STATE_DTYPES:
        raise ConfigError(f"engine.state_dtype = {name!r}: expected one of {', '.join(STATE_DTYPES)}")
    if name == "float32":
        return model
    if not model.state_bytes(model.dtype):
        raise ConfigError(f"engine.state_dtype = {name!r}: this model keeps no states (Gated DeltaNet); remove the key")
    kept = (layer.mixer and replace(layer.mixer, state_dtype=name) for layer in model.layers)
    return replace(model, layers=tuple(replace(layer, mixer=mixer) for layer, mixer in zip(model.layers, kept)))


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"engine.{name} = {value!r}: expected an integer of at least 1")
    return value


def _dtype(name: str, device: torch.device, model: ModelConfig) -> torch.dtype:
    if name == "auto":
        return default_dtype(device, model.dtype)
    if name not in DTYPES:
        raise ConfigError(f"engine.dtype = {name!r}: expected auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ConfigError("engine.dtype = 'float16' is not supported on cpu; use auto, bfloat16 or float32")
    return DTYPES[name]


def _speculation(requested: SpeculationConfig) -> SpeculationConfig:
    if requested.method == "auto":
        requested = replace(requested, method="lookup")
    if requested.method == "lookup" and numba_unavailable_reason() is not None:
        return SpeculationConfig("off")
    return requested


def _activations(config: EngineConfig, model: ModelConfig, device: torch.device) -> Activations:
    requested = config.activation_dtype
    if requested not in ACTIVATION_DTYPES:
        raise ConfigError(f"engine.activation_dtype = {requested!r}: expected {', '.join(ACTIVATION_DTYPES)}")
    native = native_activations(device, config.kernels)
    activations = resolve_activations(requested, model.quantization, native, config.deterministic)
    if activations != NOT_ROUNDED and config.deterministic:
        raise ConfigError(
            f"engine.deterministic: cannot be combined with engine.activation_dtype = {requested!r}, whose linears are "
            "not all known to be batch-invariant; remove one of the two"
        )
    return activations


def resolve_kv_dtype(requested: str, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the KV cache for `engine.kv_cache_dtype`: "auto" is fp8 if the checkpoint declares it."""
    return FP8 if requested == "fp8" or (requested == "auto" and model.has_fp8_cache) else dtype


def _check_supported(config: EngineConfig) -> None:
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"engine.kv_cache_dtype = {config.kv_cache_dtype!r}: expected one of {', '.join(KV_CACHE_DTYPES)}"
        )
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"engine.gpu_memory_utilization = {config.gpu_memory_utilization}: expected a number in (0, 1]"
        )
    if config.deterministic and config.tensor_parallel_size > 2:
        raise ConfigError(
            f"engine.deterministic: cannot be combined with engine.tensor_parallel_size = "
            f"{config.tensor_parallel_size}: the order in which more than two partial sums are added depends on the "
            "number of tokens; use at most 2, or remove one of the keys"
        )
    if config.adapters and config.deterministic:
        raise ConfigError(
            "engine.deterministic: cannot be combined with adapters, whose products are not batch-invariant; remove "
            "one of the two"
        )
