"""What a job asks of each row in place of a completion: one file a task, with its requests and its result columns."""
