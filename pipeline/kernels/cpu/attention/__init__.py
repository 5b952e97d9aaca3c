"""Attention over the paged cache on CPU."""
