"""Defaults by machine: limits of sequences and tokens in a step, and the size of KV blocks. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLimits:
    """Maximum running sequences and tokens of a step, where EngineConfig sets none."""

    max_num_seqs: int
    max_num_batched_tokens: int


BLOCK_SIZES = {"cpu": 16, "cuda": 64}
"""Default tokens of a KV block."""
MIN_BLOCK_SIZE = 16
"""Smallest default where layers share pages of several blocks."""

CPU_LIMITS = BatchLimits(64, 2048)
SMALL_GPU_LIMITS, GPU_LIMITS = BatchLimits(256, 8192), BatchLimits(512, 8192)
LARGE_GPU_LIMITS = BatchLimits(1024, 16384)
_GIB = 1 << 30


def gpu_limits(memory_bytes: int, capability: tuple[int, int], weight_bytes: int) -> BatchLimits:
    """Return the default limits by a GPU's memory and compute capability, and the size of the model's weights.

    The largest limits are vLLM's for `LLM` on GPUs of at least 70 GiB except the A100, where it measured that steps of
    16,384 tokens are slower (`EngineArgs.get_batch_defaults`). They apply from compute capability 9.0, if the weights
    leave half of the memory, because the largest step and captured steps take some GB more. Below that vLLM has 256
    rows; by the cost model 512 are 3 to 10% faster for generation on an A100 or L40S, and gain nothing on cards of
    24 GB.
    """
    if memory_bytes >= 70 * _GIB and capability >= (9, 0) and weight_bytes <= memory_bytes / 2:
        return LARGE_GPU_LIMITS
    return GPU_LIMITS if memory_bytes >= 35 * _GIB else SMALL_GPU_LIMITS


def max_default_seqs(on_gpu: bool) -> int:
    """Return the largest default of `max_num_seqs`, for callers that do not know the GPU yet."""
    return (LARGE_GPU_LIMITS if on_gpu else CPU_LIMITS).max_num_seqs
