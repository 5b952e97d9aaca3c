"""One run of a job, from its plan to its report."""
