"""Random numbers that depend only on their key, and sampling from weights with one of them.

Streams are independent numbers for the same seed and position: PLAIN samples the token of a plain step, ACCEPT decides
on a draft that was sampled from a known distribution, RESIDUAL samples the replacement of a rejected one, DRAFT is for
proposers that sample their drafts.

Shapes: R rows, V vocabulary, B blocks of the cumulative sum, W tokens of one block.
"""

import numpy as np
import torch

PLAIN, ACCEPT, RESIDUAL, DRAFT = range(4)

_BLOCK = 512  # tokens of one block of the two-level cumulative sum


def uniforms(seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """Return one number in [0, 1) per row (float64, 53 random bits), which depends only on its seed and position.

    It applies splitmix64's output function (Steele, Lea, Flood 2014) to the seed, then to seed and position, then to
    the stream: a counter-based generator without state between steps. `stream` gives further independent numbers for
    the same position.
    """
    with np.errstate(over="ignore"):
        key = _mix64(np.asarray(seeds).astype(np.uint64) + _GOLDEN)
        key = _mix64(key + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        bits = _mix64(key + np.uint64(stream + 1) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(w_RV: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """Return the first token at which the cumulative weight exceeds u times the total: inverse transform sampling.

    Sums are fp64 and in two levels, blocks and then the tokens of one block. Only tokens with positive weight are
    returned, whatever the rounding.
    """
    num_rows, num_tokens = w_RV.shape
    num_blocks = -(-num_tokens // _BLOCK)
    padded_RV = torch.nn.functional.pad(w_RV, (0, num_blocks * _BLOCK - num_tokens))
    w_RBW = padded_RV.view(num_rows, num_blocks, _BLOCK)
    w_RB = sums(w_RBW)
    block_R, remaining_R = first_past(w_RB, u_R * w_RB.sum(dim=-1))
    w_RW = w_RBW[torch.arange(num_rows, device=w_RV.device), block_R].double()
    within_R, _ = first_past(w_RW, remaining_R)
    return block_R * _BLOCK + within_R


def first_past(w_RN: torch.Tensor, target_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first index of positive weight where the running sum exceeds the target (otherwise the last index of
    positive weight), and the target minus the sum before that index."""
    sum_RN = w_RN.cumsum(dim=-1)
    positive_RN = w_RN > 0
    past_RN = positive_RN & (sum_RN > target_R[:, None])
    index_N = torch.arange(w_RN.shape[1], device=w_RN.device)
    last_R = torch.where(positive_RN, index_N, 0).amax(dim=-1)
    first_R = torch.where(past_RN.any(dim=-1), past_RN.to(torch.uint8).argmax(dim=-1), last_R)
    before_R = (sum_RN - w_RN).gather(1, first_R[:, None])[:, 0]
    return first_R, target_R - before_R


def sums(w_RN: torch.Tensor) -> torch.Tensor:
    """Return fp64 sums over the last dimension. torch on CPU would write an fp64 copy first."""
    if w_RN.device.type != "cpu":
        return w_RN.sum(dim=-1, dtype=torch.float64)
    return torch.from_numpy(np.add.reduce(w_RN.numpy(), axis=-1, dtype=np.float64))
