"""`pipeline bench gpu`: whether the kernels are right on this card, how near its limits they are, and whole jobs.

Runs without Ray, pydantic and a network. `run` puts it together: correctness -> rates (what the card reaches alone) ->
kernels -> linears -> jobs -> `report`.
"""
