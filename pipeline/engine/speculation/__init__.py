"""Whether drafts pay, by measurement. No torch."""
