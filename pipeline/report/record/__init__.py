"""Records of runs: time by phase, tokens and rows, in integers that sum exactly."""
