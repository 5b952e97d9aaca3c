"""Records, status, metrics and logs of a run, and the states of its actors. No row depends on them."""
