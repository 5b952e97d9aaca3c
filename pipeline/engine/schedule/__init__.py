"""Scheduling: which sequences compute which tokens next, and where their KV blocks are. No torch."""
