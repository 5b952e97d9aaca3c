"""Speculative decoding in a step: proposers, draft lengths, and verification results."""
