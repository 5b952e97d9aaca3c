"""What a job will take in hours and money, before it runs."""
