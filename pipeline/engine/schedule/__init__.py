"""Which sequences compute which tokens next, and where their KV blocks lie. No torch."""
