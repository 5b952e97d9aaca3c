"""One model on one device: requests in, completions out."""
