"""Linears on activations in 8 bits: what they compute."""
