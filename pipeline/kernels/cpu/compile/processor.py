"""Processor features that kernels depend on, also for the shapes of tiles."""

from llvmlite import binding
from numba import config

_named = config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
_features = (binding.get_host_cpu_features().flatten() if _named is None else _named).split(",")


def has(*names: str) -> bool:
    """Return whether the processor has all these features, by LLVM's names."""
    return all(f"+{name}" in _features for name in names)


HAS_WIDE_VECTORS = has("avx512f")
"""Vectors of 512 bits, 32 of them: twice the products per instruction, and no slower on any processor with them."""
HAS_AVX512_BF16 = has("avx512bf16")
"""VDPBF16PS, on vectors of 512 bits: see `tiles/bf16_tile.py`."""
HAS_AMX = has("amx-bf16")
"""Units that multiply whole tiles of bfloat16, which oneDNN uses."""
