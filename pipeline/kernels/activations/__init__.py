"""Linears on 8-bit activations: definition and reference implementation."""
