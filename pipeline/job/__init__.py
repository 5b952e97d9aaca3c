"""A job from its file to its finished output: planning, computing, accounting, reporting and auditing."""
