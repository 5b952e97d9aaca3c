"""Speculative decoding in a step: who drafts, how many tokens, and what became of them."""
