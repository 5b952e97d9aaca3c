"""Reasoning: where it begins and ends in a completion, and how it is split from the answer."""
