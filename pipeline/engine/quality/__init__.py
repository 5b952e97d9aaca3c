"""Rows of a running job compared with a reference model: how far what is served is from what could be."""
