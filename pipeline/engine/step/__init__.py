"""The loop of an engine: one step at a time, one ahead, or undone where memory does not suffice."""
