"""The sections of a job file: each key with its type, range, default, meaning, an example and its part in resuming."""
