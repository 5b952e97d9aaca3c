"""Tensor computations. `select.py` chooses the kernels for a device."""
