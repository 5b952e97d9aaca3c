"""Run records, cost accounting, and the job report."""
