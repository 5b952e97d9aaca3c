"""`pipeline bench gpu`: how near the card's limits the kernels are, each checked before it is timed, and whole jobs.

Runs without Ray, pydantic and a network. `run` puts it together: rates (what the card reaches alone) -> kernels ->
linears -> jobs -> `report`.
"""
