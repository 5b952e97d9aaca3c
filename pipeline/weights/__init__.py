"""Readers of quantized checkpoints: each format's tensors become the packed weights that kernels take."""
