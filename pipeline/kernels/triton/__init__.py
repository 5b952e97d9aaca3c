"""Kernels for NVIDIA GPUs. The only package that imports triton; `kernel_set.py` puts them together."""
