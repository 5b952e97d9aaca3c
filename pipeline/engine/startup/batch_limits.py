"""How many sequences and tokens a step may hold where `EngineConfig` does not say: by the machine. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLimits:
    """Sequences running at once and tokens of a step, where EngineConfig does not say."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_LIMITS = BatchLimits(64, 2048)
SMALL_GPU_LIMITS, GPU_LIMITS = BatchLimits(256, 8192), BatchLimits(512, 8192)
LARGE_GPU_LIMITS = BatchLimits(1024, 16384)
_GIB = 1 << 30


def gpu_limits(memory_bytes: int, capability: tuple[int, int], weight_bytes: int) -> BatchLimits:
    """By a GPU's memory and compute capability, and what the model's weights take of it.

    The largest are those of vLLM for `LLM` on GPUs of 70 GiB and more that are no A100, where it measured that steps of
    16,384 tokens lose (`EngineArgs.get_batch_defaults`): here from compute capability 9.0 on, and where weights leave
    half of the memory, since the largest step and captured steps take some GB more. Between, vLLM has 256 rows; by the
    cost model 512 serve generation 3 to 10% faster on an A100 or L40S, and nothing is gained on cards of 24 GB.
    """
    if memory_bytes >= 70 * _GIB and capability >= (9, 0) and weight_bytes <= memory_bytes / 2:
        return LARGE_GPU_LIMITS
    return GPU_LIMITS if memory_bytes >= 35 * _GIB else SMALL_GPU_LIMITS


def most_default_seqs(on_gpu: bool) -> int:
    """The most that an engine's `max_num_seqs` can be by default, for who does not know on which GPU it will run."""
    return (LARGE_GPU_LIMITS if on_gpu else CPU_LIMITS).max_num_seqs
