"""Tasks that read known tokens instead of generating: log-probabilities, and pooled hidden states."""
