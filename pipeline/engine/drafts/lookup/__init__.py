"""Drafts that are looked up in the texts themselves: n-grams, and patterns of copying."""
