"""Jobs on cards in simulated time: the engine's scheduler and graphs, the cost model, and the host beside it"""
