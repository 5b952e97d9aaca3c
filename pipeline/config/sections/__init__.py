"""The sections of a job file, one a file: each key with its type, range, default, meaning and an example."""
