"""Readers of quantized checkpoints: they convert each format's tensors to the packed weights that kernels read."""
