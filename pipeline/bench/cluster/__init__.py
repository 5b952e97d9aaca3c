"""A job on many machines in simulated time: what its last minutes, losses and machines cost."""
