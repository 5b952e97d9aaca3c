"""Input files in Parquet and JSON Lines: finding, checking and reading them."""
