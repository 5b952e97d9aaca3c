"""A job's report as one page for a browser."""
