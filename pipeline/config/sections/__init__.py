"""The sections of a job file, one a file: every key with its type, range and default, what it means and an example."""
