"""Ray Data graph that carries units to engine actors and summaries back; the only code that imports Ray."""
