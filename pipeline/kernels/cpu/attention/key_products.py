"""Products of queries with keys as the cache stores them. Only the attention kernels call these functions.

If queries and keys are both bfloat16 and the processor multiplies pairs of it (AVX-512 BF16), both are read as words of
32 bits, two adjacent elements each, and nothing is widened. Otherwise queries are widened in advance, and keys as they
are read. Sums are float32 either way; products of pairs are exact.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic` and `overload`.

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from pipeline.kernels.cpu.compile.numerics import float_of_bits, wide
from pipeline.kernels.cpu.compile.prefetch import prefetch
from pipeline.kernels.cpu.compile.processor import HAS_AVX512_BF16, HAS_WIDE_VECTORS
from pipeline.kernels.cpu.tiles.vector_code import FLOAT, INT64, REORDER, STORED, VectorCode

KEYS = 8
"""Keys that `dot_products` multiplies with one query at once."""
WIDTH = 16 if HAS_WIDE_VECTORS else 8
"""Elements, or words of two, that `dot_products` processes at a time."""
_HALF, _HIGH_HALF = np.uint32(16), np.uint32(0xFFFF0000)


def in_pairs(array, other):
    raise NotImplementedError("only inside compiled code")


@overload(in_pairs, inline="always")
def _words_or_elements(array, other):
    """Return queries or keys in the form in which they are multiplied: words of pairs if possible, else unchanged."""
    if HAS_AVX512_BF16 and array.dtype == other.dtype == types.uint16:
        return lambda array, other: array.view(np.uint32)
    return lambda array, other: array


@intrinsic
def _transpose(typing_context, out, out_at, out_row, q, q_at, start_R, first):
    """Set out[out_at + i * out_row + r] = q[q_at + start_R[first + r] + i], widened, for r and i < WIDTH."""

    def lower(context, builder, signature, arguments):
        code = VectorCode(context, builder, signature, arguments)
        out, q, start = code.element_address(0, 1), code.element_address(3, 4), code.element_address(5, 6)
        dtype, out_row = signature.args[3].dtype, arguments[2]
        some = []
        for r in range(WIDTH):
            loaded = code.load(code.after(q, builder.load(code.after(start, r))), STORED[dtype], WIDTH)
            some.append(loaded if dtype == types.uint32 else code.widened(loaded, dtype))
        step = 1
        while step < WIDTH:  # in each square of 2 * step, swap the two off-diagonal parts
            for r in range(WIDTH):
                if not r & step:
                    a, b = some[r], some[r + step]
                    some[r] = code.pick(a, b, [i if not i & step else WIDTH + i - step for i in range(WIDTH)])
                    some[r + step] = code.pick(a, b, [WIDTH + i if i & step else i + step for i in range(WIDTH)])
            step *= 2
        for i, lanes in enumerate(some):
            code.store(lanes, code.after(out, code.times(i, out_row)))
        return context.get_dummy_value()

    index = types.intp
    return types.void(out, index, index, q, index, start_R, index), lower


def query_lanes(q, start_R, depth):
    raise NotImplementedError("only inside compiled code")


@overload(query_lanes)
def _lanes(q, start_R, depth):
    """Transpose the queries of flat `q` (by `in_pairs`) that begin at start_R to (depth, R), flat, in the type in which
    they are multiplied. R is a multiple of WIDTH."""
    dtype = np.uint32 if q.dtype == types.uint32 else np.float32

    def side_by_side(q, start_R, depth):
        num_rows, in_squares = len(start_R), depth // WIDTH * WIDTH
        lanes = np.empty(depth * num_rows, dtype)
        for r in range(0, num_rows, WIDTH):
            for i in range(0, in_squares, WIDTH):
                _transpose(lanes, i * num_rows + r, num_rows, q, i, start_R, r)
        for i in range(in_squares, depth):
            for r in range(num_rows):
                lanes[i * num_rows + r] = wide(q[start_R[r] + i])
        return lanes

    return side_by_side


def query_rows(q, start, count):
    raise NotImplementedError("only inside compiled code")


@overload(query_rows)
def _rows(q, start, count):
    """Return `count` elements of flat queries `q` (by `in_pairs`), in the type in which they are multiplied."""
    if q.dtype != types.uint16:
        return lambda q, start, count: q[start : start + count]

    def copied(q, start, count):
        row = np.empty(count, np.float32)
        for i in range(count):
            row[i] = wide(q[start + i])
        return row

    return copied


def product(q, k):
    raise NotImplementedError("only inside compiled code")


@overload(product, inline="always")
def _product(q, k):
    """Multiply one element of a query, or one pair, with that of a key."""
    if q != types.uint32:
        return lambda q, k: q * wide(k)
    return lambda q, k: (
        float_of_bits(q << _HALF) * float_of_bits(k << _HALF)
        + float_of_bits(q & _HIGH_HALF) * float_of_bits(k & _HIGH_HALF)
    )


@intrinsic
def dot_products(typing_context, out, out_at, q, q_at, k, k_at, k_row, depth, scale, ahead):
    """Multiply one query with KEYS keys. For n < KEYS:

        out[out_at + n] = scale * sum over d < depth of q[q_at + d] * k[k_at + n * k_row + d]

    Arrays are one-dimensional; `depth` is a multiple of WIDTH. Indices are not checked. LLVM compiles such a loop to
    one product at a time and sums across the lanes of each; here the lanes of all are summed together. The memory
    `ahead` elements after each element of k is prefetched; `ahead` 0 prefetches what is being read.
    """

    def lower(context, builder, signature, arguments):
        code = VectorCode(context, builder, signature, arguments)
        out, q, k = code.element_address(0, 1), code.element_address(2, 3), code.element_address(4, 5)
        k_row, depth, scale, ahead = arguments[6:]
        q_dtype, k_dtype = signature.args[2].dtype, signature.args[4].dtype
        are_pairs = q_dtype == types.uint32

        def load(address, dtype):
            loaded = code.load(address, STORED[dtype], WIDTH)
            return loaded if are_pairs else code.widened(loaded, dtype)

        def joined(a, b, *picks):
            """Return the sum of two selections of the elements of two vectors."""
            return builder.fadd(*(code.pick(a, b, pick) for pick in picks), flags=REORDER)

        k_N = [code.after(k, code.times(n, k_row)) for n in range(KEYS)]
        sum_N = [code.held(code.same(FLOAT, WIDTH, 0.0)) for _ in range(KEYS)]
        with cgutils.for_range(builder, builder.sdiv(depth, INT64(WIDTH))) as loop:
            d = builder.mul(loop.index, INT64(WIDTH))
            some_q = load(code.after(q, d), q_dtype)
            for n in range(KEYS):
                at = code.after(k_N[n], d)
                some_k, before = load(at, k_dtype), builder.load(sum_N[n])
                prefetch(builder, code.after(at, ahead))
                if are_pairs:
                    total = code.add_pairs(before, some_q, some_k)
                else:
                    total = builder.fadd(before, builder.fmul(some_q, some_k, flags=REORDER), flags=REORDER)
                builder.store(total, sum_N[n])
        # In each group of four lanes, the sum of key n (of four keys) moves to lane n without crossing groups.
        fours = range(0, WIDTH, 4)
        low, high = ([f + p for f in fours for p in (a, WIDTH + a, b, WIDTH + b)] for a, b in ((0, 1), (2, 3)))
        two_N = [joined(builder.load(sum_N[n]), builder.load(sum_N[n + 1]), low, high) for n in range(0, KEYS, 2)]
        low, high = ([f + p for f in fours for p in (a, b, WIDTH + a, WIDTH + b)] for a, b in ((0, 1), (2, 3)))
        first, second = (joined(two_N[n], two_N[n + 1], low, high) for n in (0, 2))
        count = WIDTH // 2
        while count >= 4:
            # add the lower and the upper half of each vector, until four lanes are left
            begins = (0, WIDTH) if count == WIDTH // 2 else (0, 2 * count)
            low, high = ([b + o + n for b in begins for n in range(count)] for o in (0, count))
            first = second = joined(first, second, low, high)
            count //= 2
        code.store(builder.fmul(first, code.everywhere(scale, KEYS), flags=REORDER), out)
        return context.get_dummy_value()

    index = types.intp
    return types.void(out, index, q, index, k, index, index, index, types.float32, index), lower
