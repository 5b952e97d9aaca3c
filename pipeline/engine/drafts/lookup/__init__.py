"""Drafts looked up in existing texts: n-grams, and patterns of copying from prompts."""
