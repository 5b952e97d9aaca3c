"""Jobs handed to a cluster that somebody else's machine drives: Ray's job server."""
