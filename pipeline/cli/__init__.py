"""The command line: parses, calls, prints, and leaves with an exit code that means what it says."""
