"""Inspect a job and its rows without running it."""
