"""Engine startup: from an `EngineConfig` to a loaded model with a KV cache of the right size."""
