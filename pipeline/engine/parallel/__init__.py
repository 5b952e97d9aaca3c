"""Tensor parallelism: other processes compute shares of the steps that this one plans."""
