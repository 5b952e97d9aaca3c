"""How much memory there is, and how many KV blocks it is worth."""

import ctypes
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from pipeline.errors import ConfigError
from pipeline.kernels.select import serves_int4_alone
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.machine.cgroup import memory_limit
from pipeline.model.config import ModelConfig
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Weights
from pipeline.roofline.job_simulation import kv_room
from pipeline.weights.formats import is_int4

CPU_SHARE = 0.25  # of the free memory; the rest is left to reading, writing and Ray
MIN_GROUP_SIZE = 32  # the smallest group of 4-bit weights, assumed where a checkpoint names none
INT4_BLOCK = 128  # on a GPU, a scale and a zero point serve at most so many inputs of a 4-bit weight
EXPECTED_TOKENS = 2048  # of a sequence: the KV cache it needs comes before 16-bit copies of 4-bit weights
ENOUGH_TOKENS = 128 << 10  # of all sequences: beyond these, copies gain more than cache, by the cost model
SLACK_BYTES = 512 << 20  # on a GPU, for workspaces of libraries and pieces that the allocator cannot use


def free_cpu_bytes() -> int:
    """Memory that can be taken without swapping, within the limits of this process's control groups."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = memory_limit()
    return available if limit is None else min(available, limit.free_bytes)


def return_freed_bytes() -> None:
    """Return freed memory to the system. Loading frees as much as it keeps, in pieces that glibc would hold on to."""
    with suppress(AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def weight_bytes(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    keeps_dense: bool = True,
    activation_dtype: str = "auto",
) -> int:
    """About how many bytes linears and embeddings take once loaded; norms and biases are left out.

    keeps_dense: of 4-bit weights on a GPU, see `dense_weights_fit`. activation_dtype: rounded ones
    serve all quantized linears; in fp8 on a GPU with a byte a weight and a scale in float32 for each group.
    """
    if device.type != "cpu":
        dense = config.num_parameters() * dtype.itemsize
        if activation_dtype.startswith("fp8") and config.quantization is not None:
            per_group = 4 / config.quantization.group_size if config.quantization.group_size is not None else 0
            return dense - int(config.num_linear_parameters() * (dtype.itemsize - 1 - per_group))
        if config.quantization is None or not is_int4(config.quantization):
            return dense
        group_size = min(config.quantization.group_size or MIN_GROUP_SIZE, INT4_BLOCK)
        packed = int(config.num_linear_parameters() * (0.5 + 4 / group_size))  # a scale and a zero in 16 bit each
        return packed + dense - (0 if keeps_dense else config.num_linear_parameters() * dtype.itemsize)
    width = min(config.dtype.itemsize, dtype.itemsize)  # narrow weights are widened where they are used
    embeddings = 2 * config.vocab_size * config.hidden_size * width  # a table to look up and a linear, tied or not
    if config.quantization is None:
        return config.num_linear_parameters() * width + embeddings
    bits, group_size = config.quantization.bits, config.quantization.group_size
    packed = bits / 8 + (8 / group_size if group_size is not None else 0)  # a scale and a zero in float32 for a group
    if dtype != torch.float32 and activation_dtype == "auto":  # products on rounded ones are those of float32 there
        # The dense form for many tokens, and of others than 4-bit integers for few too.
        if is_int4(config.quantization) and serves_int4_alone(dtype):
            packed = 0.5 + (3 / group_size if group_size is not None else 0)  # in float16 and a byte
        else:
            packed = dtype.itemsize + (packed if is_int4(config.quantization) else 0)
    return int(config.num_linear_parameters() * packed) + embeddings


def release_cached_memory() -> None:
    """Give what the device's allocator keeps for reuse back, so that pieces of other sizes can be had."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def gpu_share_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """What is free of the part of a GPU's memory that may be used; below 0 where others use more than the rest. What
    torch keeps for reuse, of loading or of a step that was measured, is given back first: it counts as free."""
    release_cached_memory()
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1.0 - gpu_memory_utilization))


def cache_before_dense(max_num_seqs: int, max_model_len: int) -> int:
    """Tokens that the KV cache is to hold before 4-bit weights get a 16-bit form.

    A larger cache runs more sequences at once, over which a step's reading of the weights is spread. That is little
    beyond some hundred sequences, whose products take longer than reading 4-bit weights, and less than what each step
    loses where it has to write the 16-bit form anew.
    """
    return min(max_num_seqs * min(max_model_len, EXPECTED_TOKENS), ENOUGH_TOKENS)


def dense_weights_fit(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, budget_bytes: int, kv_tokens: int
) -> bool:
    """Whether `budget_bytes` hold 4-bit weights, their `dtype` form beside them and a KV cache of so many tokens.

    Steps of many tokens are multiplied with that form; without room for it, it is written anew in each of them.
    kv_tokens: see `cache_before_dense`.
    """
    weights = weight_bytes(config, torch.device("cuda"), dtype)
    return weights + kv_tokens * config.kv_bytes_per_token(kv_dtype) + SLACK_BYTES <= budget_bytes


def kv_budget_bytes(
    device: torch.device, wanted: int | None, need: int, gpu_memory_utilization: float, step_bytes: int
) -> int:
    """Bytes for the KV cache: `wanted` when given, else what `need` asks for within the device's share.

    `step_bytes`: what the largest step takes beside weights and cache, on a GPU.
    """
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return min(need, int(free_cpu_bytes() * CPU_SHARE))
    budget = gpu_share_bytes(device, gpu_memory_utilization) - step_bytes - SLACK_BYTES
    if budget <= 0:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{device}: {free >> 20} MiB free of {total >> 20} after loading the weights leave nothing for the KV "
            f"cache at engine.gpu_memory_utilization = {gpu_memory_utilization}: a step takes {step_bytes >> 20} MiB, "
            f"{SLACK_BYTES >> 20} are kept in reserve. Lower engine.max_num_batched_tokens, or raise the utilization"
        )
    return min(need, budget)


def served_form(
    weights: Weights, size: DecoderSize, card: Ceilings, borders: Crossover, max_num_seqs: int, kv_value_bytes: float
) -> Weights:
    """4-bit weights with `cached` set where 16-bit copies fit beside the KV cache, and `fused_tokens` the most tokens
    of a step that go through the fused product. Other weights are returned unchanged."""
    if weights.fp8 or not weights.int4:
        return weights
    cached = replace(weights, cached=True, fused_tokens=borders.cached)
    if usable_kv_room(size, cached, card, kv_value_bytes) >= cache_before_dense(max_num_seqs, EXPECTED_TOKENS):
        return cached
    return replace(weights, cached=False, fused_tokens=borders.scratch)


def usable_kv_room(size: DecoderSize, weights: Weights, card: Ceilings, kv_value_bytes: float) -> int:
    """Tokens that the KV cache holds beside the weights and the memory that is kept free."""
    slack = int(SLACK_BYTES / size.kv_bytes_per_token(kv_value_bytes))
    return kv_room(size, weights, card, kv_value_bytes=kv_value_bytes) - slack
