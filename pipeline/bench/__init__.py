"""Benchmarks of `pipeline bench`: fixed work, medians, comparison with other engines on the user's machine."""
