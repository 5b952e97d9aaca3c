"""Sampling: from logits to tokens, on the host and on a device, with and without drafts."""
