"""Parts of a job's report that tell of one way of working each, and that only jobs have which work so."""
