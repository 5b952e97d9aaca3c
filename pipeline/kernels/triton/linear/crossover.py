"""Up to how many tokens an int4 weight on a GPU goes through the fused product. Imports no triton."""

CROSSOVER_CACHED = 64
"""Most tokens that the fused kernel takes where 16-bit weights lie ready: where another such kernel, Marlin, and cuBLAS
cross on an H200. This one has not been timed."""

CROSSOVER_SCRATCH = 192
"""The same where 16-bit weights are written anew in each call: as long as reading the 4-bit ones 9 times."""
