"""The engine's process, and its supervisor, which outlives it and finds rows that crash it."""
