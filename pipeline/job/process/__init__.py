"""The engine's own process and its supervisor, which outlives it and finds the row that ends it."""
