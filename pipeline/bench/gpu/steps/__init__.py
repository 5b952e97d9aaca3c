"""Decoding steps of the engine by rows and context: what the card does in them, kernel by kernel, and what the host
does meanwhile."""
