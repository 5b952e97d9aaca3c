"""The cost model: the least time of a step (`step`) and of a whole job (`job`) on a card. No torch, no device."""
