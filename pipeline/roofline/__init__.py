"""Minimum time of a step (`cost_model`) and of a whole job (`job_simulation`) on a card. No torch, no device."""
