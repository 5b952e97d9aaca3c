"""Matrix products whose sums stay in registers: one generator for all kinds."""
