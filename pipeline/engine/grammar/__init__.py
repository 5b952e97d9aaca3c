"""Structured outputs: what a completion may be, and the masks that hold its tokens to it."""
