"""Compilation of kernels by numba, their cache, and their threads."""
