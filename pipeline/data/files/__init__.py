"""Input files: finding, checking and reading them."""
