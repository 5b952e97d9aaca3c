"""What runs leave behind: their records, what they cost, and the report for people."""
