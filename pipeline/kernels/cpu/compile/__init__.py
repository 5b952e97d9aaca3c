"""How kernels are compiled by numba, cached and shared out to threads."""
