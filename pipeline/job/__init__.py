"""A job from its file to its finished output: planned, computed, counted, told, looked at again."""
