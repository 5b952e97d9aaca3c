"""Structured outputs: their specification, and the token masks that enforce it."""
