"""Available memory and the budget of the KV cache."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.errors import ConfigError
from pipeline.formatting import shown_bytes
from pipeline.kernels.activations.act_quant import NOT_ROUNDED, Activations
from pipeline.kernels.select import supports_int4_alone
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.machine.cgroup import memory_limit
from pipeline.model.config import ModelConfig, StoredParts
from pipeline.model.offload import STAGING_BUFFERS, spread_layers
from pipeline.roofline.cards import Card
from pipeline.roofline.cost_model import DENSE_BYTES, Weights
from pipeline.roofline.kv_pages import KVPages
from pipeline.weights.formats import (
    BLOCK,
    QuantFormat,
    has_only_experts,
    has_small_blocks,
    int4_group_bytes,
    is_int4,
    linear_forms,
)
from pipeline.weights.gguf import BLOCK_TYPES, BlockType, GgufFormat

CPU_SHARE = 0.25  # of the free memory; the rest is for readers, writers and Ray
MIN_GROUP_SIZE = 32  # the smallest group of 4-bit weights, assumed if a checkpoint names none
FLOAT_SCALES = 8  # bytes of a scale and a minimum in float32
EXPECTED_TOKENS = 2048  # per sequence: a cache for them takes precedence over 16-bit copies of 4-bit weights
ENOUGH_TOKENS = 128 << 10  # of all sequences: above this, copies gain more than cache, by the cost model
SLACK_BYTES = 512 << 20  # on a GPU, for library workspaces and allocator fragmentation


def free_cpu_bytes() -> int:
    """Return the memory available without swapping, within the limits of this process's control groups."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = memory_limit()
    return available if limit is None else min(available, limit.free_bytes)


def return_freed_bytes() -> None:
    """Return freed memory to the system. Loading frees as much as it keeps, in pieces that glibc would keep."""
    with suppress(AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def weight_bytes(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    keeps_dense: bool = True,
    activations: Activations = NOT_ROUNDED,
) -> int:
    """Return the approximate size of linears and embeddings once loaded; norms and biases are left out.

    keeps_dense: for 4-bit and fp8 weights on a GPU, see `dense_weights_fit`. activations: if they are rounded for all
    quantized linears, these take the form for that: for fp8 a byte per weight, and a float32 scale per block if the
    checkpoint has blocks. If not for all, weights are counted as if for none.
    """
    experts = config.size.expert_parameters
    linears = config.num_linear_parameters() - experts
    if device.type != "cpu":
        embeddings = config.num_embedding_parameters() * dtype.itemsize
        if isinstance(config.quantization, GgufFormat) and config.tie_embeddings:  # a quantized table and a 16-bit head
            embeddings += int(config.vocab_size * config.hidden_size * _table_bytes(config.quantization.embedding, 0))
        packed, expert_bytes = _bytes_per_parameter(config, dtype, keeps_dense, activations)
        return embeddings + int(linears * packed) + int(experts * expert_bytes)
    if isinstance(config.quantization, GgufFormat):
        return _gguf_bytes_on_cpu(config, config.quantization, dtype)
    width = min(config.dtype.itemsize, dtype.itemsize)  # narrow weights are widened where they are used
    embeddings = 2 * config.vocab_size * config.hidden_size * width  # a lookup table and a linear, tied or not
    if config.quantization is None:
        return config.num_linear_parameters() * width + embeddings
    bits, group_size = config.quantization.bits, config.quantization.group_size
    is_float = config.quantization.has_codes or linear_forms(config.quantization) == {"fp8"}
    per_group = 4 if is_float else 8  # a float32 scale, and a zero point of integers
    packed = bits / 8 + (per_group / group_size if group_size is not None else 0)
    # Quantized activations use the float32 form.
    if (fp8_bytes := _fp8_bytes(config.quantization, activations)) is not None:
        packed = fp8_bytes
    elif dtype != torch.float32 and not activations.cover(config.quantization):
        # The dense form for many tokens; formats other than fp8 and 4-bit integers use it for few tokens too.
        if is_int4(config.quantization) and supports_int4_alone(dtype):
            packed = 0.5 + (3 / group_size if group_size is not None else 0)  # a float16 scale and a byte
        elif linear_forms(config.quantization) != {"fp8"}:
            packed = dtype.itemsize + (packed if is_int4(config.quantization) else 0)
    if has_only_experts(config.quantization):
        return int(experts * packed) + linears * width + embeddings
    return int(config.num_linear_parameters() * packed) + embeddings


def _table_bytes(type_name: str, width: int) -> float:
    """Return the bytes of a value of an embedding in this type of GGUF: a byte and its share of a scale and a zero
    point, or `width` if it is not quantized."""
    kind = BLOCK_TYPES.get(type_name)
    return width if kind is None else 1 + 8 / kind.group_size


def _gguf_bytes_on_cpu(config: ModelConfig, stored: GgufFormat, dtype: torch.dtype) -> int:
    """Return what `weight_bytes` does. Each type has its own form."""
    width = dtype.itemsize

    def bytes_of(kind: BlockType | None) -> float:
        if kind is None or (dtype != torch.float32 and not (kind.bits == 4 and supports_int4_alone(dtype))):
            return width
        return kind.bits / 8 + 8 / kind.group_size

    table, head = _table_bytes(stored.embedding, width), bytes_of(BLOCK_TYPES.get(stored.head))
    embeddings = int(config.vocab_size * config.hidden_size * (table + head))
    return int(config.num_linear_parameters() * stored.mean(bytes_of)) + embeddings


@dataclass(frozen=True)
class OffloadPlan:
    """Layers whose weights are in host memory. host_bytes: approximate size of these weights. staging_bytes: of the
    buffers on the device."""

    layers: tuple[int, ...]
    host_bytes: int
    staging_bytes: int

    @property
    def freed_bytes(self) -> int:
        return self.host_bytes - self.staging_bytes


def offload_plan(layer_bytes: Sequence[int], cpu_offload_gb: float) -> OffloadPlan | None:
    """Return the layers that `engine.cpu_offload_gb` offloads from a GPU; None if it is 0. Raises ConfigError if the
    layers hold less, or the staging buffers take as much as it frees."""
    if cpu_offload_gb == 0:
        return None
    layers = spread_layers(layer_bytes, int(cpu_offload_gb * 1e9))
    staging_bytes = STAGING_BUFFERS * max(layer_bytes)
    if layers is None or len(layers) <= STAGING_BUFFERS:
        raise ConfigError(
            f"engine.cpu_offload_gb = {cpu_offload_gb}: expected 0, or more than {shown_bytes(staging_bytes)}, which "
            f"staging takes on the GPU, and at most {shown_bytes(sum(layer_bytes))}, the weights of the layers"
        )
    return OffloadPlan(layers, sum(layer_bytes[index] for index in layers), staging_bytes)


def layer_bytes_on_gpu(config: ModelConfig, dtype: torch.dtype, activations: Activations = NOT_ROUNDED) -> list[int]:
    """Return the approximate size of each layer's linears and experts, without 16-bit copies of packed weights."""
    linear_bytes, expert_bytes = _bytes_per_parameter(config, dtype, False, activations)

    def num_parameters(linears: dict[str, StoredParts]) -> int:
        return sum(rows * inputs for parts in linears.values() for _, rows, inputs in parts)

    sizes = []
    for index, layer in enumerate(config.layers):
        size = num_parameters(config.linears(index)) * linear_bytes
        if layer.experts is not None:
            size += layer.experts.num_experts * num_parameters(config.expert_linears(index, 0)) * expert_bytes
        sizes.append(int(size))
    return sizes


def _bytes_per_parameter(
    config: ModelConfig, dtype: torch.dtype, keeps_dense: bool, activations: Activations
) -> tuple[float, float]:
    """Return the bytes per parameter of linears and of experts on a GPU."""
    form = None if has_only_experts(config.quantization) else config.quantization
    expert_bytes = config.expert_bytes_on_gpu
    expert_bytes = dtype.itemsize if expert_bytes == DENSE_BYTES else expert_bytes
    cut = [(each.experts.width, each.is_gated) for each in config.layers if each.experts and each.experts.is_share]
    if cut and has_small_blocks(config.quantization, cut[0][0]):  # down is widened; the inputs of gate and up are whole
        expert_bytes += (dtype.itemsize - expert_bytes) / (2 + cut[0][1])
    return _linear_bytes_on_gpu(form, dtype, keeps_dense, activations), expert_bytes


def _linear_bytes_on_gpu(
    quantization: QuantFormat | None, dtype: torch.dtype, keeps_dense: bool, activations: Activations
) -> float:
    if (fp8_bytes := _fp8_bytes(quantization, activations)) is not None:
        return fp8_bytes
    copies = dtype.itemsize if keeps_dense else 0
    if linear_forms(quantization) == {"fp8"} and not has_small_blocks(quantization, BLOCK):
        return 1 + 4 / BLOCK + copies
    if isinstance(quantization, GgufFormat):
        fused = 0.5 + FLOAT_SCALES / MIN_GROUP_SIZE + copies
        return quantization.mean(lambda kind: fused if kind is not None and kind.is_fused else dtype.itemsize)
    if quantization is None or not is_int4(quantization):
        return dtype.itemsize
    group_size = min(quantization.group_size or MIN_GROUP_SIZE, BLOCK)
    return 0.5 + int4_group_bytes(quantization) / group_size + copies


def _fp8_bytes(quantization: QuantFormat | None, activations: Activations) -> float | None:
    """Return the bytes per parameter of linears for fp8 activations; None if not all linears have that form."""
    if quantization is None or activations.dtype != "fp8" or not activations.cover(quantization):
        return None
    group_size = quantization.group_size if linear_forms(quantization) == {"fp8"} else None
    return 1 + (4 / group_size if group_size is not None else 0)


def release_cached_memory() -> None:
    """Free the memory cached by the device's allocator, so that blocks of other sizes can be allocated."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def gpu_share_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """Return the free bytes within the usable share of a GPU's memory; negative if other processes use too much. Frees
    torch's cached memory first."""
    release_cached_memory()
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1.0 - gpu_memory_utilization))


def cache_before_dense(max_num_seqs: int, max_model_len: int) -> int:
    """Return the tokens that the KV cache must hold before 4-bit weights get a 16-bit copy.

    A larger cache runs more sequences at once, which share the reading of the weights in a step. Beyond some hundred
    sequences that gains little, because the products take longer than reading 4-bit weights: less than what each step
    loses if it must rebuild the 16-bit form.
    """
    return min(max_num_seqs * min(max_model_len, EXPECTED_TOKENS), ENOUGH_TOKENS)


def max_states(budget_bytes: int, state_bytes: int, pages: KVPages, length: int) -> int:
    """Return the number of sequences of `length` tokens whose states and keys and values fit."""
    cache_bytes = pages.num_pages(length) * pages.page_bytes
    fits = max(0, (budget_bytes - num_snapshots(0) * state_bytes) // (state_bytes + cache_bytes))
    while fits > 0 and fits * cache_bytes + (fits + num_snapshots(fits)) * state_bytes > budget_bytes:
        fits -= 1
    return fits


def limit_states(budget_bytes: int, state_bytes: int, pages: KVPages, max_model_len: int, max_num_seqs: int) -> int:
    """Return the default limit of running sequences: each finds `EXPECTED_TOKENS` tokens of cache."""
    if not state_bytes:
        return max_num_seqs
    return max(1, min(max_num_seqs, max_states(budget_bytes, state_bytes, pages, min(max_model_len, EXPECTED_TOKENS))))


def num_snapshots(max_num_seqs: int) -> int:
    """Return the number of states to keep for the ends of shared prefixes. Few suffice: rows with a prefix wait until
    its state is computed, then start together."""
    return 2 + max_num_seqs // 16


def dense_weights_fit(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, budget_bytes: int, kv_tokens: int
) -> bool:
    """Return whether `budget_bytes` hold 4-bit weights, their `dtype` copy and a KV cache of `kv_tokens` tokens.

    Steps of many tokens multiply with that copy; without room for it, each of them rebuilds it. kv_tokens: see
    `cache_before_dense`.
    """
    weights = weight_bytes(config, torch.device("cuda"), dtype)
    return weights + kv_tokens * config.kv_bytes_per_token(kv_dtype) + SLACK_BYTES <= budget_bytes


def weights_of_steps(config: ModelConfig, card: Card, activations: Activations, keeps_dense: bool) -> Weights:
    """Return the form of the weights for the cost model of steps. keeps_dense: see `dense_weights_fit`."""
    crossover = crossover_of(card.compute_capability)
    return replace(
        config.weights_on_card(activations),
        cached=keeps_dense,
        fused_tokens=crossover.cached if keeps_dense else crossover.scratch,
    )


def kv_budget_bytes(
    device: torch.device, wanted: int | None, need: int, gpu_memory_utilization: float, step_bytes: int
) -> int:
    """Return the bytes for the KV cache: `wanted` if set, otherwise `need`, limited to the device's share.

    `step_bytes`: memory of the largest step besides weights and cache, on a GPU.
    """
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return min(need, int(free_cpu_bytes() * CPU_SHARE))
    budget = gpu_share_bytes(device, gpu_memory_utilization) - step_bytes - SLACK_BYTES
    if budget <= 0:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{device}: {free >> 20} of {total >> 20} MiB are free after loading the weights, which leaves nothing for "
            f"the KV cache at engine.gpu_memory_utilization = {gpu_memory_utilization}: a step takes "
            f"{step_bytes >> 20} MiB, {SLACK_BYTES >> 20} MiB are reserved. Lower engine.max_num_batched_tokens, or "
            "raise the utilization"
        )
    return min(need, budget)
