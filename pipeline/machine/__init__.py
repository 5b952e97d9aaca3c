"""This machine: its clock, cores and processor, and how processes of our own are started on it."""
