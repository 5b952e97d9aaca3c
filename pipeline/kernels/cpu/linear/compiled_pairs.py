"""The loops of linears in bfloat16 on processors that multiply pairs of it (AVX-512 BF16), compiled by numba.

Weights lie as `compiled_linear.py` has them: words_TWL[tile, w] holds two neighbouring inputs of bfloat16 of each lane,
which is what the instruction takes, so nothing is widened. Weights of 4 bits lie eight inputs a word, in such an order
that bits 4 j to 4 j + 3 of a word's halves are inputs 2 j and 2 j + 1 of its eight: 128 + q is then a pair of bfloat16
by one mask and the exponent's bits, and the 128 is taken out with the zero point. Scales are multiplied in where a
group ends, in float32, so the weight itself is never rounded.

A token's sums are made in one order, however many tokens there are. Tokens come and go as the bits of bfloat16 in
uint16.

Suffixes: M tokens, K inputs, N outputs, G groups of inputs, T tiles, W words of a lane, L lanes.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

import numpy as np
from numba import njit

from pipeline.kernels.cpu.compile.numerics import wide
from pipeline.kernels.cpu.compile.threads import kernel, share_out
from pipeline.kernels.cpu.linear.compiled_linear import LANES, TOKENS, write_tile
from pipeline.kernels.cpu.tiles.pair_tile import add_pair_products

DEPTH = 512  # pairs of a tile that serve all tokens before the next ones are read: they stay in the second cache
AHEAD = 2048  # words of 4 bits that are asked for before they are needed; of pairs it is the next DEPTH
_OTHER_LINES = 16  # of a row


@njit(inline="always")
def _add_tile(
    sums, x, x_at, x_row, count, words, words_at, scales, zeros, scales_at, totals, totals_at, totals_row, ahead,
    depth, pairs_a_word
):  # fmt: skip
    """`add_pair_products` of `count` tokens with a tile of weights, whose sums (count, LANES) lie flat as well.

    Of pairs each piece of tokens asks for half of the cache lines ahead, in turn: while some of them are multiplied,
    the next weights come, and multiplying does not wait for memory. The processor's own foresight is a piece too late.
    Eight tokens go by four, so that all lines are asked for. Weights of 4 bits are unpacked in registers, and
    so for as many tokens at once as there are sums: up to twelve, then of half as many outputs at a time; where fewer
    are left than a piece has, some are computed twice.
    """
    m = 0
    while m + 6 <= count and count - m != 8 and pairs_a_word == 1:
        add_pair_products(
            sums, m * LANES, LANES, x, x_at, x_row, words, words_at, LANES, scales, zeros, scales_at,
            totals, totals_at, totals_row, ahead, depth, 6, 6, 4, pairs_a_word
        )  # fmt: skip
        ahead ^= _OTHER_LINES
        m, x_at, totals_at = m + 6, x_at + 6 * x_row, totals_at + 6 * totals_row
    while m + 8 < count and pairs_a_word == 4:
        for half in range(0, LANES, 32):
            add_pair_products(
                sums, m * LANES + half, LANES, x, x_at, x_row, words, words_at + half, LANES, scales, zeros,
                scales_at + half, totals, totals_at, totals_row, ahead, depth, min(count - m, 12), 12, 2, pairs_a_word
            )  # fmt: skip
        m, x_at, totals_at = m + 12, x_at + 12 * x_row, totals_at + 12 * totals_row
    if m + 4 < count and pairs_a_word == 4:
        for half in range(0, LANES, 32):
            add_pair_products(
                sums, m * LANES + half, LANES, x, x_at, x_row, words, words_at + half, LANES, scales, zeros,
                scales_at + half, totals, totals_at, totals_row, ahead, depth, count - m, 8, 2, pairs_a_word
            )  # fmt: skip
        m = count
    while m + 4 <= count or (m + 3 == count and pairs_a_word == 4):
        add_pair_products(
            sums, m * LANES, LANES, x, x_at, x_row, words, words_at, LANES, scales, zeros, scales_at,
            totals, totals_at, totals_row, ahead, depth, min(count - m, 4), 4, 4, pairs_a_word
        )  # fmt: skip
        ahead ^= _OTHER_LINES
        m, x_at, totals_at = m + 4, x_at + 4 * x_row, totals_at + 4 * totals_row
    if m + 2 <= count:
        add_pair_products(
            sums, m * LANES, LANES, x, x_at, x_row, words, words_at, LANES, scales, zeros, scales_at,
            totals, totals_at, totals_row, ahead, depth, 2, 2, 4, pairs_a_word
        )  # fmt: skip
        ahead ^= _OTHER_LINES
        m, x_at, totals_at = m + 2, x_at + 2 * x_row, totals_at + 2 * totals_row
    if m < count:
        add_pair_products(
            sums, m * LANES, LANES, x, x_at, x_row, words, words_at, LANES, scales, zeros, scales_at,
            totals, totals_at, totals_row, ahead, depth, 1, 1, 4, pairs_a_word
        )  # fmt: skip


@njit(inline="always")
def _begin_sums(sum_ML, bias_N, first):
    """Sums of a tile begin with its bias, which may be none."""
    for m in range(len(sum_ML)):
        sum_L, bias_L = sum_ML[m], bias_N[first : first + LANES]
        sum_L[:] = np.float32(0.0)
        for n in range(len(bias_L)):
            sum_L[n] = bias_L[n]


@kernel()
def multiply_pairs(x_MK, words_TWL, bias_N, out_MN, begin, end):
    """out = x @ weight.T + bias; the bias float32, or of no elements."""
    num_tokens, num_words = len(x_MK), words_TWL.shape[1]
    num_tiles, num_pieces = len(words_TWL), (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        return share_out(num_tiles * num_pieces)
    x = x_MK.reshape(-1).view(np.uint32)
    for item in range(begin, end):
        t, first_token = item % num_tiles, item // num_tiles * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words, sum_ML = words_TWL[t].reshape(-1), np.empty((count, LANES), np.float32)
        _begin_sums(sum_ML, bias_N, t * LANES)
        sums = sum_ML.reshape(-1)
        for start in range(0, num_words, DEPTH):
            depth, x_at = min(DEPTH, num_words - start), first_token * num_words + start
            _add_tile(
                sums, x, x_at, num_words, count, words, start * LANES,
                None, None, 0, None, 0, 0, DEPTH * LANES, depth, 1
            )  # fmt: skip
        write_tile(sum_ML, out_MN, first_token, t * LANES)


@kernel()
def multiply_pairs_int4(x_MK, words_TWL, scales_TGL, zeros_TGL, bias_N, total_MG, out_MN, begin, end):
    """`multiply_pairs` of groups of 4-bit weights: scales in float32 or as the bits of float16, zeros in uint8.

    total_MG is room for the sum of each token's group of inputs.
    """
    (num_tokens, num_inputs), (num_tiles, num_groups) = x_MK.shape, scales_TGL.shape[:2]
    size, num_pairs, num_pieces = num_inputs // num_groups, num_inputs // 2, (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        for m in range(num_tokens):
            for g in range(num_groups):
                some, total = x_MK[m, g * size : (g + 1) * size], np.float32(0.0)
                for i in range(len(some)):
                    total += wide(some[i])
                total_MG[m, g] = total
        return share_out(num_tiles * num_pieces)
    x = x_MK.reshape(-1).view(np.uint32)
    totals = total_MG.reshape(-1)
    for item in range(begin, end):
        t, first_token = item % num_tiles, item // num_tiles * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words, sum_ML = words_TWL[t].reshape(-1), np.empty((count, LANES), np.float32)
        scales, zeros = scales_TGL[t].reshape(-1), zeros_TGL[t].reshape(-1)
        _begin_sums(sum_ML, bias_N, t * LANES)
        sums = sum_ML.reshape(-1)
        for g in range(num_groups):
            x_at, total_at = first_token * num_pairs + g * size // 2, first_token * num_groups + g
            _add_tile(
                sums, x, x_at, num_pairs, count, words, g * size // 8 * LANES,
                scales, zeros, g * LANES, totals, total_at, num_groups, AHEAD, size // 8, 4
            )  # fmt: skip
        write_tile(sum_ML, out_MN, first_token, t * LANES)
