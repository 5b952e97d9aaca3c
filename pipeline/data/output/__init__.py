"""The output: parts and their columns, what a listing of them says, and merging them into larger files."""
