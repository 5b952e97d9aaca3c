"""Linears on CPU, by the form of their weights."""
