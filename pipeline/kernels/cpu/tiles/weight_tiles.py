"""Memory layout of the weights of all compiled linears: tiles of LANES outputs.

words_TWL[tile, w] holds a few consecutive inputs of each output of the tile in 32 bits: one float32, two bfloat16 (the
even one in the low half), four of 8 bits or eight of 4 bits. A tile is read sequentially, and loops over its outputs
are vectorized. The last tile is padded with zeros.

Suffixes of all linears: M tokens, K inputs, N outputs, G groups or B blocks of inputs, T tiles, W words, L lanes.
"""

import numpy as np
import torch

LANES = 64  # outputs of a tile
TOKENS = 256  # processed by a tile at a time: their sums stay in the second cache


def join(part_NWJ: np.ndarray) -> np.ndarray:
    """Join (N, W, J) integers of 32 / J bits into (N, W) words, the first one lowest."""
    parts = part_NWJ.shape[2]
    words_NW = part_NWJ[:, :, 0].astype(np.uint32)
    for j in range(1, parts):
        words_NW |= part_NWJ[:, :, j].astype(np.uint32) << np.uint32(32 // parts * j)
    return words_NW


def tiles(values_NW: np.ndarray) -> np.ndarray:
    """Arrange (N, W) as (T, W, L)."""
    missing = -len(values_NW) % LANES
    padded_NW = np.pad(values_NW, ((0, missing), (0, 0))) if missing else values_NW
    return np.ascontiguousarray(padded_NW.reshape(-1, LANES, values_NW.shape[1]).transpose(0, 2, 1))


def bf16_tiles(weight_NK: torch.Tensor) -> np.ndarray:
    """Return the tiles of bfloat16 weights."""
    return tiles(join(weight_NK.contiguous().view(torch.uint16).numpy().reshape(len(weight_NK), -1, 2)))


def word_tiles(q_NK: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Return the tiles of integers of 32 / len(order) bits; `order` of a word's inputs, from its lowest bits on."""
    return tiles(join(q_NK.reshape(len(q_NK), -1, len(order))[:, :, order]))


def narrow_zeros(zeros_NG: torch.Tensor) -> np.ndarray:
    """Return the zero points as uint8 if they are integers, else as float32."""
    narrow_NG = zeros_NG.to(torch.uint8)
    return (narrow_NG if torch.equal(narrow_NG.to(zeros_NG.dtype), zeros_NG) else zeros_NG.to(torch.float32)).numpy()


def narrow_scales(scales_NG: torch.Tensor) -> np.ndarray:
    """Return the scales as bits of float16 if that is exact, else as float32. Scales are an eighth of what is read."""
    narrow_NG = scales_NG.to(torch.float16)
    exact = torch.equal(narrow_NG.to(torch.float32), scales_NG.to(torch.float32))
    return narrow_NG.view(torch.uint16).numpy() if exact else scales_NG.to(torch.float32).numpy()
