"""Kernels for processors: oneDNN and int4 linears, batched attention over the paged cache."""
