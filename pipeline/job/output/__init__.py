"""The output of a job: how far it is, whether it is sound, its end, and what it becomes for others."""
