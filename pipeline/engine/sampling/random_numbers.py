"""Random numbers that depend on their key alone, and sampling from weights with one of them.

Streams are independent numbers of the same seed and position: PLAIN samples the token of a plain step, ACCEPT decides
on a draft that was sampled from a known distribution, RESIDUAL samples what replaces a rejected one, DRAFT is for a
proposer that samples its drafts.

Shapes: R rows, V vocabulary, B blocks of the cumulative sum, W tokens of one block.
"""

import numpy as np
import torch

PLAIN, ACCEPT, RESIDUAL, DRAFT = range(4)

_BLOCK = 512  # tokens of one block of the two-level cumulative sum


def uniforms(seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """One number in [0, 1) per row (float64, 53 random bits) from its seed and position alone.

    splitmix64's output function (Steele, Lea, Flood 2014) over the seed, then over seed and position, then
    over the stream: a counter-based generator, nothing to keep between steps. `stream` gives further
    independent numbers of the same position.
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
    """The first token at which the cumulative weight passes u of the whole: inverse transform sampling.

    Sums are fp64 and in two levels, blocks and then the tokens of one block. Only a token with weight above 0
    is ever taken, whatever the rounding: a place counts only where its own weight is positive.
    """
    num_rows, num_tokens = w_RV.shape
    num_blocks = -(-num_tokens // _BLOCK)
    padded_RV = torch.nn.functional.pad(w_RV, (0, num_blocks * _BLOCK - num_tokens))
    w_RBW = padded_RV.view(num_rows, num_blocks, _BLOCK)
    w_RB = sums(w_RBW)
    block_R, rest_R = first_past(w_RB, u_R * w_RB.sum(dim=-1))
    w_RW = w_RBW[torch.arange(num_rows, device=w_RV.device), block_R].double()
    within_R, _ = first_past(w_RW, rest_R)
    return block_R * _BLOCK + within_R


def first_past(w_RN: torch.Tensor, target_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place of positive weight where the running sum passes the target (else the last of positive
    weight), and how far beyond the sum before that place the target lies."""
    sum_RN = w_RN.cumsum(dim=-1)
    positive_RN = w_RN > 0
    past_RN = positive_RN & (sum_RN > target_R[:, None])
    place_N = torch.arange(w_RN.shape[1], device=w_RN.device)
    last_R = torch.where(positive_RN, place_N, 0).amax(dim=-1)
    first_R = torch.where(past_RN.any(dim=-1), past_RN.to(torch.uint8).argmax(dim=-1), last_R)
    before_R = (sum_RN - w_RN).gather(1, first_R[:, None])[:, 0]
    return first_R, target_R - before_R


def sums(w_RN: torch.Tensor) -> torch.Tensor:
    """fp64 sums over the last dimension. On CPU torch would write a copy in fp64 first."""
    if w_RN.device.type != "cpu":
        return w_RN.sum(dim=-1, dtype=torch.float64)
    return torch.from_numpy(np.add.reduce(w_RN.numpy(), axis=-1, dtype=np.float64))
