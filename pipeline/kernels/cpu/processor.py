"""What the processor has that kernels are written for, looked at once; tiles have their shapes by it."""

from llvmlite import binding
from numba import config

_named = config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
_features = (binding.get_host_cpu_features().flatten() if _named is None else _named).split(",")

HAS_WIDE_VECTORS = "+avx512f" in _features
"""Vectors of 512 bits, 32 of them. Twice the products an instruction; no slower anywhere that has them."""
MULTIPLIES_PAIRS = "+avx512bf16" in _features
"""VDPBF16PS, on vectors of 512 bits: see `pair_tile.py`."""
MULTIPLIES_TILES = "+amx-bf16" in _features
"""Units for products of whole tiles of bfloat16, which oneDNN uses."""
