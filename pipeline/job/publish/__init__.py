"""`pipeline publish`: copy a finished output to a dataset of the Hugging Face Hub, or to a Delta table."""
