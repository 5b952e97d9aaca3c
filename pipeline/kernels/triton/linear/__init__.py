"""Linears on a GPU: int4, fp8, and products in a fixed order."""
