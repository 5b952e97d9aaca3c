"""Linears on CPU, by the format of their weights."""
