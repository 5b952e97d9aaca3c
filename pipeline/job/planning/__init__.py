"""Plan a job and its actors before any model is loaded."""
