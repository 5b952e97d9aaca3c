"""A small product of pairs of bfloat16 whose sums stay in registers, by AVX-512's own instruction."""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.prefetch import ask_for

LANES = 16
"""Outputs of a vector: float32 sums, or as many pairs."""
SCALES_AHEAD = 2
"""Rows of scales and zeros that are asked for so far ahead."""
_NIBBLES, _EXPONENTS = 0x000F000F, 0x43004300  # of a pair; 0x4300 + q is 128 + q in bfloat16


class Bfloat16(ir.Type):
    """LLVM's type, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


def _unpacked(builder, words, j):
    """Pairs `j` of a vector of words of 4 bits, 128 too large."""

    def same(value):
        return ir.Constant(words.type, [value] * LANES)

    shifted = builder.lshr(words, same(4 * j)) if j else words
    return builder.or_(builder.and_(shifted, same(_NIBBLES)), same(_EXPONENTS))


@intrinsic(prefer_literal=True)
def add_pair_products(
    typing_context, out, out_at, out_row, a, a_at, a_row, b, b_at, b_row, scales, zeros, scales_at, totals, totals_at,
    totals_row, ahead, depth, count, rows, vectors, pairs_a_word
):  # fmt: skip
    """A small matrix product of pairs whose sums stay in registers: for r < rows and n < 16 * vectors (both literals)

        out[out_at + r * out_row + n] += sum over d < depth of
            pair a[a_at + r * a_row + d] . pair b[b_at + d * b_row + n]

    Arrays are one-dimensional; out is float32, a and b 32 bits wide: two bfloat16, the first one in the low half.
    Products are exact and their sums float32, where numbers too small for a normal float32 count as 0 (Intel's
    VDPBF16PS). Indices are not checked. The order of sums is the same for all `rows` and `vectors`.

    Where there are only `count` rows, the last one stands for those that are missing: it is computed several times,
    each time the same.

    With `pairs_a_word` 4 (else 1, both literals) b holds weights of 4 bits, four pairs a word: pair j is bits 4 j to
    4 j + 3 of each half, plus 128 (see `compiled_pairs.py`); so a has 4 * depth pairs.

    What lies `ahead` elements behind each row of b is asked for, for what comes next: all of a row's cache lines with
    `pairs_a_word` 4, every other one of them, for the second cache, with 1.

    Where scales (float32, or the bits of float16), zeros (uint8) and totals (float32) are not None, that sum less
    (128 + zeros[scales_at + n]) * totals[totals_at + r * totals_row] is multiplied by scales[scales_at + n] before.

    It runs at nine tenths of the multipliers' rate with `rows` by `vectors` of 6 by 4, or 12 by 2 of weights of 4 bits.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (rows, vectors, pairs_a_word)):
        return None
    num_rows, num_vectors, num_pairs = (each.literal_value for each in (rows, vectors, pairs_a_word))

    def lower(context, builder, signature, arguments):
        int32, int64, float32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
        sums_kind, words_kind = ir.VectorType(float32, LANES), ir.VectorType(int32, LANES)
        pairs_kind = ir.VectorType(Bfloat16(), 2 * LANES)
        kind = ir.FunctionType(sums_kind, [sums_kind, pairs_kind, pairs_kind])
        add_products = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        out_row, a_row, b_row, totals_row, ahead, depth = (arguments[at] for at in (2, 5, 8, 14, 15, 16))

        def place(array, at):
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            return builder.gep(data, [arguments[at]])

        def load(address, kind, align=4):
            loaded = builder.load(builder.bitcast(address, kind.as_pointer()))
            loaded.align = align
            return loaded

        def everywhere(word):
            single = builder.insert_element(ir.Constant(words_kind, ir.Undefined), word, int32(0))
            return builder.shuffle_vector(single, single, ir.Constant(words_kind, [0] * LANES))

        with_scales = not isinstance(signature.args[9], types.NoneType)

        def scale_and_zero(at):
            """Of a vector's outputs, in float32."""
            zero = load(builder.gep(place(10, 11), [at]), ir.VectorType(ir.IntType(8), LANES), align=1)
            zero = builder.uitofp(zero, sums_kind)
            address = builder.gep(place(9, 11), [at])
            if signature.args[9].dtype == types.float32:
                return load(address, sums_kind), zero
            return builder.fpext(load(address, ir.VectorType(ir.HalfType(), LANES), align=2), sums_kind), zero

        out, a, b = place(0, 1), place(3, 4), place(6, 7)
        last = builder.sub(arguments[17], int64(1))
        row_R = [builder.select(builder.icmp_signed("<", int64(r), last), int64(r), last) for r in range(num_rows)]
        a_R = [builder.gep(a, [builder.mul(row, a_row)]) for row in row_R]
        cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        sums = {cell: cgutils.alloca_once(builder, sums_kind) for cell in cells}  # become registers
        for held in sums.values():
            builder.store(ir.Constant(sums_kind, [0.0] * LANES), held)
        if with_scales:
            for array in (9, 10):
                width = signature.args[array].dtype.bitwidth // 8
                row = num_vectors * LANES
                for first in range(0, row, 64 // width):
                    ask_for(builder, builder.gep(place(array, 11), [int64(SCALES_AHEAD * row + first)]))
        with cgutils.for_range(builder, depth) as loop:
            b_d = builder.gep(b, [builder.mul(loop.index, b_row)])
            b_V = [load(builder.gep(b_d, [int64(v * LANES)]), words_kind) for v in range(num_vectors)]
            for v in range(0, num_vectors, 2 if num_pairs == 1 else 1):
                ask_for(builder, builder.gep(b_d, [builder.add(ahead, int64(v * LANES))]), near=num_pairs > 1)
            first = builder.mul(loop.index, int64(num_pairs))
            for j in range(num_pairs):
                pair_V = b_V if num_pairs == 1 else [_unpacked(builder, words, j) for words in b_V]
                pair_V = [builder.bitcast(words, pairs_kind) for words in pair_V]
                for r in range(num_rows):
                    value = builder.load(builder.gep(a_R[r], [builder.add(first, int64(j))]))
                    pair = builder.bitcast(everywhere(value), pairs_kind)
                    for v in range(num_vectors):
                        added = builder.call(add_products, [builder.load(sums[r, v]), pair, pair_V[v]])
                        builder.store(added, sums[r, v])
        flags = ("contract",)
        for v in range(num_vectors):
            if with_scales:
                scale, zero = scale_and_zero(int64(v * LANES))
                offset = builder.fmul(builder.fadd(zero, ir.Constant(sums_kind, [128.0] * LANES)), scale)
            target_R = [builder.gep(out, [builder.add(builder.mul(row, out_row), int64(v * LANES))]) for row in row_R]
            before_R = [load(target, sums_kind) for target in target_R]  # all of them, before one that is there twice
            for r, (row, target, added) in enumerate(zip(row_R, target_R, before_R)):
                product = builder.load(sums[r, v])
                if with_scales:
                    total = builder.load(builder.gep(place(12, 13), [builder.mul(row, totals_row)]))
                    total = builder.bitcast(everywhere(builder.bitcast(total, int32)), sums_kind)
                    added = builder.fsub(added, builder.fmul(total, offset, flags=flags), flags=flags)
                    product = builder.fmul(product, scale, flags=flags)
                added = builder.fadd(added, product, flags=flags)
                builder.store(added, builder.bitcast(target, sums_kind.as_pointer())).align = 4
        return context.get_dummy_value()

    index = types.intp
    arrays = (out, index, index, a, index, index, b, index, index, scales, zeros, index, totals, index, index)
    return types.void(*arrays, index, index, index, rows, vectors, pairs_a_word), lower
