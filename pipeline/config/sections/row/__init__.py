"""What is asked of each row: its prompt, its task, and how its tokens are chosen."""
