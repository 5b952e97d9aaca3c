"""Drafts on or off, by measurement. No torch."""
