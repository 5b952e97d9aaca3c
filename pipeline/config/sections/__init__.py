"""Sections of a job file: each key with its type, range, default, description, example and resume class."""
