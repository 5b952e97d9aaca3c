"""What an engine actor does with a unit, from its rows to its part, without Ray."""
