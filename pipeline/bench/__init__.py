"""Benchmarks for `pipeline bench`: fixed workloads, medians, and comparisons with other engines on one machine."""
