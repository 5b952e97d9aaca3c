"""What can be chosen between at a size of batch: no drafts, or the drafts of one proposer. No torch.

How deep a sequence drafts is not an arm's: each finds its own depth (row_depth.py), and every further arm costs
contests. Arms of 2, 4 and 6 drafts left the demonstration job's rows at 1.93 and 1.56 times plain steps with 8 and 32
at once, 6 alone at 2.17 and 1.76 (`pipeline bench speculation`).
"""

Arm = int  # the proposer's number
OFF: Arm = -1


def bucket_of(num_sequences: int) -> int:
    """The nearest power of two, by its exponent: a batch of 8 that lacks a sequence for a step stays in its bucket."""
    return ((2 * num_sequences * num_sequences).bit_length() - 1) // 2
