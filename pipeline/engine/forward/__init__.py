"""Runs the model on a step: captured or not, one step in flight, or over known texts."""
