"""Everything that is computed on tensors. `select.py` says which kernels serve."""
