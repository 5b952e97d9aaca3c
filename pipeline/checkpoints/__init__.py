"""Model folders: resolving `model.path`, downloading, hashing, and checking the files that are read."""
