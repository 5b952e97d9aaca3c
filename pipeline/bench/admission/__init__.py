"""Jobs whose KV cache is tight, in simulated time: what a rule of admission costs in steps and repeated work"""
