"""The whole job against the engine alone, and what a large job costs its driver."""
