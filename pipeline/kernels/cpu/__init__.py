"""CPU kernels compiled by numba, and oneDNN's linears.

compile/: compilation, caching and threads. tiles/: small matrix products in registers. linear/: linears for each kind
of weight. attention/: attention over the paged cache. elementwise, layer_loop, invariant.
"""
