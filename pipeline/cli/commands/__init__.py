"""The commands, each with its options, and where they go."""
