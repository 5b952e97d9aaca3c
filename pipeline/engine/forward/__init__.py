"""Model execution of a step: the runner, CUDA graphs, and the step in flight."""
