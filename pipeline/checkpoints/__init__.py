"""A model's folder: what a user may write for it, its download, its digest, and which of its files are read."""
