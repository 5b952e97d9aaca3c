"""The output: parts, their columns and totals, and compaction into larger files."""
