"""Output of a job: its progress, integrity, publication and conversion."""
