"""Attention over the paged cache on a GPU: split-KV decode, cascade, prefill."""
