"""Products of bfloat16 tokens with a tile of weights in bfloat16 or 4 bits, for processors with AVX-512 BF16."""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from numba import njit, types
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.prefetch import prefetch
from pipeline.kernels.cpu.tiles.register_tile import Bf16PairDot, register_tile, zeros
from pipeline.kernels.cpu.tiles.vector_code import FLOAT, INT32, INT64, VectorCode
from pipeline.kernels.cpu.tiles.weight_tiles import LANES

_WIDTH = 16  # float32 sums, or words, in a vector
_SCALES_AHEAD = 2  # groups by which scales and zero points are prefetched
_NIBBLES, _EXPONENTS = 0x000F000F, 0x43004300  # of a pair; 0x4300 + q is 128 + q in bfloat16
_OTHER_LINES = 16  # words of a cache line


@intrinsic(prefer_literal=True)
def _add_products(typing_context, arrays, offsets, m, n, count, ahead, rows, vectors, pairs_a_word):
    """Add the products of some tokens with a tile of weights to their sums.

    For r < rows, l < 16 * vectors and row = m + r (rows, vectors and pairs_a_word are literals)

        sums[row * LANES + n + l] += sum over d < depth of
            pair x[x_at + row * x_row + d] . pair words[words_at + d * LANES + n + l]

    arrays: (sums, x, words, scales, zeros, totals), the last three None if unused; offsets: (x_at, x_row, words_at,
    scales_at, totals_at, totals_row, depth). Arrays are contiguous: sums float32, words 32 bits wide, x of any type in
    which a pair is 32 bits. Indices are not checked. The order of sums is the same for all `rows` and `vectors`.

    With `pairs_a_word` 4 (else 1) a word holds four pairs of 4-bit weights: pair j is bits 4 j to 4 j + 3 of each half,
    plus 128; so x has 4 * depth pairs. Then (128 + zeros[scales_at + n + l]) * totals[totals_at + row * totals_row] is
    subtracted from that sum, and the result is multiplied by scales[scales_at + n + l] (float32, or bits of float16)
    before it is added. Zeros are uint8 or float32.
    Rows from `count` on repeat the last row before it; all of them write the same result.

    The words `ahead` of each row of words are prefetched: all of their cache lines with `pairs_a_word` 4; every other
    line, into the second cache, with 1. The code reaches nine tenths of the multipliers' rate with `rows` by `vectors`
    of 6 by 4, or 12 by 2 for 4-bit weights.
    """
    num_rows, num_vectors, num_pairs = (each.literal_value for each in (rows, vectors, pairs_a_word))
    of_4_bits = num_pairs == 4

    def lower(context, builder, signature, arguments):
        code = VectorCode(context, builder, signature, arguments)
        kinds = list(arrays)
        sums, x, words, scales, zero_points, totals = code.members(0)
        x_at, x_row, words_at, scales_at, totals_at, totals_row, depth = code.members(1)
        m, n, count, ahead = arguments[2:6]
        row_R = [builder.add(m, INT64(r)) for r in range(num_rows)]
        if of_4_bits and num_rows > 2:
            last = builder.sub(count, INT64(1))
            row_R = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in row_R]
        words, x = code.after(words, words_at, n), builder.bitcast(x, INT32.as_pointer())
        x_R = [code.after(x, x_at, builder.mul(row, x_row)) for row in row_R]
        if of_4_bits:
            scales, zero_points = (code.after(array, scales_at, n) for array in (scales, zero_points))
            for kind, address in ((kinds[3], scales), (kinds[4], zero_points)):
                for first in range(0, num_vectors * _WIDTH, 512 // kind.dtype.bitwidth):
                    prefetch(builder, code.after(address, _SCALES_AHEAD * LANES + first))

        def unpacked(packed, j):
            """Return pairs `j` of a vector of words, 128 too large."""
            shifted = builder.lshr(packed, code.same(INT32, _WIDTH, 4 * j)) if j else packed
            pairs = builder.and_(shifted, code.same(INT32, _WIDTH, _NIBBLES))
            return builder.or_(pairs, code.same(INT32, _WIDTH, _EXPONENTS))

        def operands(step):
            words_d = code.after(words, builder.mul(step, INT64(LANES)))
            word_V = [code.load(code.after(words_d, v * _WIDTH), INT32, _WIDTH) for v in range(num_vectors)]
            for v in range(0, num_vectors, 1 if of_4_bits else 2):
                prefetch(builder, code.after(words_d, ahead, v * _WIDTH), near=of_4_bits)
            first = builder.mul(step, INT64(num_pairs))
            for j in range(num_pairs):

                def value_of(r, j=j):
                    return code.everywhere(builder.load(code.after(x_R[r], first, j)), _WIDTH)

                yield value_of, [unpacked(packed, j) for packed in word_V] if of_4_bits else word_V

        sum_RV = register_tile(Bf16PairDot(code), zeros(num_rows, num_vectors, _WIDTH), depth, operands)
        flags = ("contract",)
        for v in range(num_vectors):
            if of_4_bits:
                zero = code.load_zeros(code.after(zero_points, v * _WIDTH), kinds[4].dtype, _WIDTH)
                scale = code.load_scales(code.after(scales, v * _WIDTH), kinds[3].dtype, _WIDTH)
                offset = builder.fmul(builder.fadd(zero, code.same(FLOAT, _WIDTH, 128.0)), scale)
            sum_at_R = [code.after(sums, builder.mul(row, INT64(LANES)), n, v * _WIDTH) for row in row_R]
            before_R = [code.load(sum_at, FLOAT, _WIDTH) for sum_at in sum_at_R]  # load all first: rows may repeat
            for r, (row, sum_at, added) in enumerate(zip(row_R, sum_at_R, before_R)):
                product = sum_RV[r, v]
                if of_4_bits:
                    total = builder.load(code.after(totals, totals_at, builder.mul(row, totals_row)))
                    less = builder.fmul(code.everywhere(total, _WIDTH), offset, flags=flags)
                    added = builder.fsub(added, less, flags=flags)
                    product = builder.fmul(product, scale, flags=flags)
                code.store(builder.fadd(added, product, flags=flags), sum_at)
        return context.get_dummy_value()

    index = types.intp
    return types.void(arrays, offsets, index, index, index, index, rows, vectors, pairs_a_word), lower


@njit(inline="always")
def add_bf16_products(arrays, offsets, count, ahead):
    """Apply `_add_products` to `count` tokens and a tile of bfloat16 weights.

    Successive pieces of tokens prefetch alternating halves of the cache lines ahead: the next weights arrive during the
    multiplication. The processor's own prefetching is one piece too late. Eight tokens are split by four, so that all
    lines are prefetched.
    """
    m = 0
    while m + 6 <= count and count - m != 8:
        _add_products(arrays, offsets, m, 0, count, ahead, 6, 4, 1)
        m, ahead = m + 6, ahead ^ _OTHER_LINES
    while m + 4 <= count:
        _add_products(arrays, offsets, m, 0, count, ahead, 4, 4, 1)
        m, ahead = m + 4, ahead ^ _OTHER_LINES
    if m + 2 <= count:
        _add_products(arrays, offsets, m, 0, count, ahead, 2, 4, 1)
        m, ahead = m + 2, ahead ^ _OTHER_LINES
    if m < count:
        _add_products(arrays, offsets, m, 0, count, ahead, 1, 4, 1)


@njit(inline="always")
def add_bf16_int4_products(arrays, offsets, count, ahead):
    """Apply `_add_products` to `count` tokens and a tile of 4-bit weights.

    The weights are unpacked in registers, so it computes as many tokens at once as there are registers for sums: up to
    twelve, for half of the outputs at a time. If fewer tokens are left than a piece has, some are computed twice.
    """
    m = 0
    while m + 8 < count:
        for half in range(0, LANES, 32):
            _add_products(arrays, offsets, m, half, count, ahead, 12, 2, 4)
        m += 12
    if m + 4 < count:
        for half in range(0, LANES, 32):
            _add_products(arrays, offsets, m, half, count, ahead, 8, 2, 4)
        m = count
    if m + 2 < count:
        _add_products(arrays, offsets, m, 0, count, ahead, 4, 4, 4)
        m = count
    if m + 2 == count:
        _add_products(arrays, offsets, m, 0, count, ahead, 2, 4, 4)
        m += 2
    if m < count:
        _add_products(arrays, offsets, m, 0, count, ahead, 1, 4, 4)
