"""Kernels on a card: checked against the reference, then timed against their floor."""
