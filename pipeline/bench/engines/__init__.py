"""This engine against `transformers.generate` and other engines on the same requests."""
