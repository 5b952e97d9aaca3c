"""What a run tells of itself: its records, status and logs, and what its actors say; no row depends on it."""
