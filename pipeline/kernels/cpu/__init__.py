"""Kernels for processors, compiled by numba, and oneDNN's linears.

compile/: how kernels are compiled, cached and run on threads. tiles/: small matrix products in registers. linear/:
linears for each kind of weight. attention/: attention over the paged cache. elementwise, layer_loop, invariant.
"""
