"""Requests of OpenAI's Batch API as rows: custom_id, prompt, and per-row sampling values."""
