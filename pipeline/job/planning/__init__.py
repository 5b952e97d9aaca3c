"""What a job is, and what its actors are given, found out before any model is loaded."""
