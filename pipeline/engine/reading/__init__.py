"""What is read off known tokens in place of generating: log-probabilities, and hidden states pooled to one vector"""
