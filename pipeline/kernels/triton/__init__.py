"""Kernels for NVIDIA GPUs. The only package that imports triton; `kernel_set.py` assembles the set."""
