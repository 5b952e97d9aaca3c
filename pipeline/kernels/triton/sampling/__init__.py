"""Selection of tokens from rows of logits on a GPU."""
