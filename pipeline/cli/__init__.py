"""The command line: parses arguments, calls the package, prints results and exits with a documented code."""
