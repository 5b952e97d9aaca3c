"""Cascade attention: a prefix that several sequences share is read once for all their queries."""
