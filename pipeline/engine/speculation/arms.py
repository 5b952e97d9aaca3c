"""What can be chosen between: no drafts, or one proposer's drafts up to a depth. No torch."""

from typing import NamedTuple


class Arm(NamedTuple):
    """Drafts of this proposer, at most `depth` tokens for a sequence."""

    proposer: int
    depth: int


OFF = Arm(-1, 0)


def depths_up_to(most: int) -> tuple[int, ...]:
    """2, 4, 8 and so on below `most`, and `most`."""
    depths = []
    depth = 2
    while depth < most:
        depths.append(depth)
        depth *= 2
    return (*depths, most)


def bucket_of(num_sequences: int) -> int:
    """The nearest power of two, by its exponent: a batch of 8 that lacks a sequence for a step stays in its bucket."""
    return ((2 * num_sequences * num_sequences).bit_length() - 1) // 2
