"""Estimate the time and cost of a job before it runs."""
