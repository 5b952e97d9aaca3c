"""Rows computed by an OpenAI-compatible server: one that runs already, or one that we start."""
