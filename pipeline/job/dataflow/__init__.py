"""The graph of Ray Data that carries units to engine actors and summaries back; all that imports Ray."""
