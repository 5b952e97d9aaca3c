"""Comparison of rows of a running job with a reference model."""
