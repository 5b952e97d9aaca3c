"""Process a unit in an engine actor, from its rows to its part. Does not import Ray."""
