"""Products of tokens in int8 with a tile of 4- or 8-bit weights, by the processor's byte instructions.

VPDPBUSD (AVX-512 VNNI, AVX-VNNI) multiplies 64 unsigned bytes by signed ones and adds each four to a 32-bit sum. AVX2's
PMADDUBSW multiplies 32 and adds adjacent products in 16 bits: with 4-bit weights the sums of STEP inputs fit there
(15 times 127, two at a time, eight times over, is at most 30,480). 8-bit weights are widened to 16 bits first. Integers
are exact and the order of the float sums is fixed, so all forms give the same bits.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.prefetch import prefetch
from pipeline.kernels.cpu.compile.processor import has
from pipeline.kernels.cpu.tiles.register_tile import Avx2ByteDot, Avx2NibbleDot, VnniDot, add_words, register_tile
from pipeline.kernels.cpu.tiles.vector_code import FLOAT, INT8, INT16, INT32, INT64, VectorCode
from pipeline.kernels.cpu.tiles.weight_tiles import LANES

STEP = 32  # inputs whose products AVX2 adds in 16 bits; blocks are multiples of it
_NEAR = 512  # inputs whose weights stay in the first cache while all tokens are processed
# Words per output by which weights are prefetched: from two tokens on, processors' own prefetching is too late.
_AHEAD = 64


@dataclass(frozen=True)
class Form:
    """Byte instructions of a processor.

    lanes: 32-bit integers per vector. in_fours: it has VPDPBUSD. tiles: tokens and vectors of three tiles whose sums
    stay in registers; the last one has a single token.
    """

    name: str
    lanes: int
    in_fours: bool
    tiles: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


AVX2 = Form("AVX2", 8, False, ((4, 2), (2, 4), (1, 8)))
AVX_VNNI = Form("AVX-VNNI", 8, True, ((4, 2), (2, 4), (1, 8)))
AVX512_VNNI = Form("AVX-512 VNNI", 16, True, ((4, 4), (2, 4), (1, 4)))


def forms_here() -> list[Form]:
    """Return the forms that this processor has the instructions for, the fastest first."""
    needed = {
        AVX512_VNNI: ("avx512f", "avx512bw", "avx512vnni"),
        AVX_VNNI: ("avx2", "fma", "f16c", "avxvnni"),
        AVX2: ("avx2", "fma", "f16c"),
    }
    return [form for form, names in needed.items() if has(*names)]


@intrinsic(prefer_literal=True)
def _add_products(typing_context, arrays, sizes, m, b, n, rows, vectors, bits, lanes, in_fours):
    """Add the products of block `b` of the inputs to the sums of tokens m to m + rows - 1 and `lanes` * `vectors`
    outputs from n on (`rows` and the arguments after it are literals):

        sums[r * LANES + n] += xs[r, b] * scales[b, n]
            * (sum over the block's inputs of (token r's byte * output n's integer of `bits` bits)
               - zeros[b, n] * x_sums[r, b])

    arrays: (sums, x, xs, x_sums, words, scales, zeros), contiguous: sums and xs float32; x int8, read four at a time;
    x_sums int32 that fit in 16 bits; words uint32; scales float32 or bits of float16; zeros uint8 or float32.
    sizes: (first token, blocks of a token, STEPs of a block). Indices are not checked.
    """
    num_rows, num_vectors, num_bits, num_lanes, has_fours = (
        each.literal_value for each in (rows, vectors, bits, lanes, in_fours)
    )
    words_of_step = STEP * num_bits // 32
    unrolled = 1 if has_fours else words_of_step

    def lower(context, builder, signature, arguments):
        code = VectorCode(context, builder, signature, arguments)
        sums, x, xs, x_sums, words, scales, zeros = code.members(0)
        first, num_blocks, steps = code.members(1)
        m, b, n = arguments[2:5]
        integers, floats = ir.VectorType(INT32, num_lanes), ir.VectorType(FLOAT, num_lanes)
        first = builder.add(first, m)
        block_x = builder.mul(steps, INT64(STEP // 4))
        x_row = builder.mul(num_blocks, block_x)
        x = code.after(builder.bitcast(x, INT32.as_pointer()), builder.mul(first, x_row), builder.mul(b, block_x))
        xs, x_sums = (code.after(array, builder.mul(first, num_blocks), b) for array in (xs, x_sums))
        words = code.after(words, builder.mul(b, builder.mul(steps, INT64(words_of_step * LANES))), n)
        scales, zeros = (code.after(array, builder.mul(b, INT64(LANES)), n) for array in (scales, zeros))
        sums = code.after(sums, builder.mul(m, INT64(LANES)), n)

        def of_row(address, r, row):
            """Return a value of token r in all lanes."""
            return code.everywhere(builder.load(code.after(address, code.times(r, row))), num_lanes)

        def unpacked(packed):
            """Return the inputs of a word as bytes, four by four."""
            if num_bits == 8:
                return [packed]
            low, pairs = code.same(INT8, 4 * num_lanes, 15), ir.VectorType(INT16, 2 * num_lanes)
            high = builder.lshr(builder.bitcast(packed, pairs), code.same(INT16, 2 * num_lanes, 4))
            halves = (builder.and_(builder.bitcast(half, low.type), low) for half in (packed, high))
            return [builder.bitcast(half, integers) for half in halves]

        def operands(step):
            first_word = code.after(words, builder.mul(step, INT64(unrolled * LANES)))
            first_x = code.after(x, builder.mul(step, INT64(unrolled * 8 // num_bits)))
            for w in range(unrolled):
                weight_V = []
                for v in range(num_vectors):
                    at = w * LANES + v * num_lanes
                    if v * num_lanes % 16 == 0:  # a cache line
                        prefetch(builder, code.after(first_word, at + _AHEAD * LANES))
                    weight_V.append(unpacked(code.load(code.after(first_word, at), INT32, num_lanes)))
                for part in range(8 // num_bits):
                    four = code.after(first_x, w * 8 // num_bits + part)
                    yield lambda r, four=four: of_row(four, r, x_row), [weight[part] for weight in weight_V]

        # A memory clobber: the float sums of the previous block are stored anyway. Without it they stay in registers,
        # which the integer sums need.
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
        less_R = [builder.neg(of_row(x_sums, r, num_blocks)) for r in range(num_rows)]
        has_integers = list(arrays)[6].dtype != types.float32
        if has_integers:
            # Begin with the zero point's part, as one of two 16-bit products; the other has its high half, 0.
            zero_V = [builder.zext(code.load(code.after(zeros, v * num_lanes), INT8, num_lanes), integers)
                      for v in range(num_vectors)]  # fmt: skip
            start = {(r, v): add_words(code, zero, less_R[r]) for r in range(num_rows) for v, zero in enumerate(zero_V)}
        else:
            none = code.same(INT32, num_lanes, 0)
            start = {(r, v): none for r in range(num_rows) for v in range(num_vectors)}
        dot = VnniDot(code) if has_fours else Avx2ByteDot(code) if num_bits == 8 else Avx2NibbleDot(code)
        exact = register_tile(dot, start, builder.mul(steps, INT64(words_of_step // unrolled)), operands)
        scale_V = [
            code.load_scales(code.after(scales, v * num_lanes), list(arrays)[5].dtype, num_lanes)
            for v in range(num_vectors)
        ]
        for r in range(num_rows):
            factor = of_row(xs, r, num_blocks)
            for v in range(num_vectors):
                sum_at = code.after(sums, r * LANES + v * num_lanes)
                scale, integer = builder.fmul(scale_V[v], factor), builder.sitofp(exact[r, v], floats)
                if not has_integers:
                    zero = code.load(code.after(zeros, v * num_lanes), FLOAT, num_lanes)
                    less = builder.fmul(zero, builder.sitofp(less_R[r], floats), flags=("contract",))
                    integer = builder.fadd(integer, less, flags=("contract",))
                product = builder.fmul(integer, scale, flags=("contract",))
                code.store(builder.fadd(code.load(sum_at, FLOAT, num_lanes), product, flags=("contract",)), sum_at)
        return context.get_dummy_value()

    index = types.intp
    return types.void(arrays, sizes, index, index, index, rows, vectors, bits, lanes, in_fours), lower


@njit(inline="always")
def _add_blocks(arrays, sizes, m, first_block, end_block, rows, vectors, bits, lanes, in_fours):
    for n in range(0, LANES, vectors * lanes):
        for b in range(first_block, end_block):
            _add_products(arrays, sizes, m, b, n, rows, vectors, bits, lanes, in_fours)


def int8_products(form: Form, bits: int) -> Callable[..., None]:
    """Return the compiled function that adds all products of some tokens with a tile."""
    lanes, in_fours = form.lanes, int(form.in_fours)
    (many, many_vectors), (some, some_vectors), (one, one_vectors) = form.tiles

    @njit(inline="always")
    def add_int8_products(arrays, sizes, count):
        num_blocks, near = sizes[1], _NEAR // (sizes[2] * STEP)
        for first_block in range(0, num_blocks, near):
            end_block, m = min(first_block + near, num_blocks), 0
            while m + many <= count:
                _add_blocks(arrays, sizes, m, first_block, end_block, many, many_vectors, bits, lanes, in_fours)
                m += many
            while m + some <= count:
                _add_blocks(arrays, sizes, m, first_block, end_block, some, some_vectors, bits, lanes, in_fours)
                m += some
            while m < count:
                _add_blocks(arrays, sizes, m, first_block, end_block, one, one_vectors, bits, lanes, in_fours)
                m += one

    return add_int8_products
