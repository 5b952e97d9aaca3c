"""The decoder: its fields from config.json, its weights from safetensors, and its forward pass."""
