"""Reasoning: where a completion's begins and ends, and what it becomes apart from the answer."""
