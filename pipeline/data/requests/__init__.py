"""Lines of OpenAI's Batch API as rows: custom_id, the prompt, and each row's own sampling values."""
