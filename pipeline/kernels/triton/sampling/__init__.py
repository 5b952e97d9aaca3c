"""Tokens of rows of logits, on a GPU."""
