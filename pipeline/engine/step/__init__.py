"""The step loop of an engine: synchronous or one step ahead, with recovery from out-of-memory."""
