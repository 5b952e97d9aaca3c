"""Lines of hosted batch APIs as rows: custom_id, the prompt, and each row's own sampling values."""
