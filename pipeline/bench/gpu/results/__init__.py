"""What a session found: figures put together from its sections, the aims, and the report for people."""
