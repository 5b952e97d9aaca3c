"""The files of an input: found, checked, and read in stretches, Parquet and JSON Lines."""
