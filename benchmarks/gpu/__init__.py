"""Times on an NVIDIA GPU: kernels, linears, engine steps, whole jobs, and vLLM on the same card."""
