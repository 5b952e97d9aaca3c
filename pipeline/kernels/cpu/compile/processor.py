"""What the processor has that kernels are written for. Tiles have their shapes by it."""

from llvmlite import binding
from numba import config

_named = config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
_features = (binding.get_host_cpu_features().flatten() if _named is None else _named).split(",")


def has(*names: str) -> bool:
    """Whether the processor has all these features, by LLVM's names."""
    return all(f"+{name}" in _features for name in names)


HAS_WIDE_VECTORS = has("avx512f")
"""Vectors of 512 bits, 32 of them. Twice the products an instruction; no slower anywhere that has them."""
MULTIPLIES_PAIRS = has("avx512bf16")
"""VDPBF16PS, on vectors of 512 bits: see `tiles/bf16_tile.py`."""
MULTIPLIES_TILES = has("amx-bf16")
"""Units for products of whole tiles of bfloat16, which oneDNN uses."""
