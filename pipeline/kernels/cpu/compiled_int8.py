"""The loops of linears on activations rounded to int8, compiled by numba around AVX2's products of bytes.

`pmaddubsw` multiplies 32 unsigned bytes by 32 signed ones and adds neighbours in 16 bits, in one instruction, where
float32 takes four for as many, after the weight has been widened. Within STEP inputs the sums stay in 16 bits (15 times
127, two at a time, eight times over, is at most 30,480), within a block in 32: integers, so they are exact.

Weights of 4 bits lie as `compiled_linear.py` has them: words_TWL[tile, w] holds inputs 8 w to 8 w + 7 of each lane. The
low halves of a word's bytes are its even inputs, the high halves its odd ones, so a token's bytes come in that order:
of each eight inputs first the even ones, then the odd ones. Apart from the other compiled files, since numba's cache on
disk looks at whole files.

Suffixes: M tokens, K inputs, N outputs, B blocks of inputs, T tiles, W words of a lane, L lanes.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pipeline.kernels.cpu.compiled_linear import LANES, TOKENS, write_tile
from pipeline.kernels.cpu.threads import kernel, share_out
from pipeline.kernels.cpu.tile import tile_product

STEP = 32  # inputs whose products are added in 16 bits
FEW = 4  # tokens below which `multiply_bytes` rounds them itself, on one thread: another call takes longer

_WORDS = STEP // 8
_VECTOR = 8
_LARGEST = np.float32(127.0)
_ZERO = np.float32(0.0)


@intrinsic(prefer_literal=True)
def _add_byte_products(
    typing_context, sums, sums_at, sums_row, x, x_at, x_row, xs, xs_at, xs_row, words, words_at, scales, scales_at,
    steps, rows, vectors
):  # fmt: skip
    """A block of `steps` times STEP inputs, `rows` tokens and 8 * `vectors` outputs (both literals):

        sums[sums_at + r * sums_row + n] += xs[xs_at + r * xs_row] * scales[scales_at + n]
            * sum over the block's inputs of (token r's byte * output n's 4 bits)

    Arrays are one-dimensional: sums, xs and scales float32; x int32, four bytes of a token each; words uint32, the next
    eight inputs LANES behind. Indices are not checked. The order of sums is the same for all `rows` and `vectors`.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (rows, vectors)):
        return None
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def lower(context, builder, signature, arguments):
        int8, int16, int32, int64, float32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
        bytes_32, words_16, words_8 = ir.VectorType(int8, 32), ir.VectorType(int16, 16), ir.VectorType(int32, _VECTOR)
        vector = ir.VectorType(float32, _VECTOR)

        def place(array, at):
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            return builder.gep(data, [arguments[at]])

        sums, x, xs, words, scales = (place(*which) for which in ((0, 1), (3, 4), (6, 7), (9, 10), (11, 12)))
        sums_row, x_row, xs_row, steps = (arguments[at] for at in (2, 5, 8, 13))

        def instruction(name, result, argument):
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [argument] * 2), name)

        multiply_bytes = instruction("llvm.x86.avx2.pmadd.ub.sw", words_16, bytes_32)
        add_neighbours = instruction("llvm.x86.avx2.pmadd.wd", words_8, words_16)
        ones, low = ir.Constant(words_16, [1] * 16), ir.Constant(bytes_32, [15] * 32)

        def behind(address, *offsets):
            for offset in offsets:
                address = builder.gep(address, [offset])
            return address

        def load(address, kind):
            loaded = builder.load(builder.bitcast(address, kind.as_pointer()))
            loaded.align = 4
            return loaded

        def everywhere(value):
            kind = ir.VectorType(value.type, _VECTOR)
            single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, int32(0))
            return builder.shuffle_vector(single, single, ir.Constant(words_8, [0] * _VECTOR))

        cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        exact = {cell: cgutils.alloca_once(builder, words_8) for cell in cells}
        for held in exact.values():
            builder.store(ir.Constant(words_8, [0] * _VECTOR), held)
        with cgutils.for_range(builder, steps) as loop:
            first_word = behind(words, builder.mul(loop.index, int64(_WORDS * LANES)))
            first_x = behind(x, builder.mul(loop.index, int64(2 * _WORDS)))
            total = {}
            for w in range(_WORDS):
                halves_V = []
                for v in range(num_vectors):
                    packed = load(behind(first_word, int64(w * LANES + v * _VECTOR)), bytes_32)
                    shifted = builder.lshr(builder.bitcast(packed, words_16), ir.Constant(words_16, [4] * 16))
                    halves_V.append([builder.and_(half, low) for half in (packed, builder.bitcast(shifted, bytes_32))])
                for r in range(num_rows):
                    for half in range(2):
                        at = behind(first_x, builder.mul(int64(r), x_row), int64(2 * w + half))
                        value = builder.bitcast(everywhere(builder.load(at)), bytes_32)
                        for v in range(num_vectors):
                            product = builder.call(multiply_bytes, [halves_V[v][half], value])
                            before = total.get((r, v))
                            total[r, v] = product if before is None else builder.add(before, product)
            for cell in cells:
                in_32_bits = builder.call(add_neighbours, [total[cell], ones])
                builder.store(builder.add(builder.load(exact[cell]), in_32_bits), exact[cell])
        for r, v in cells:
            factor = everywhere(builder.load(behind(xs, builder.mul(int64(r), xs_row))))
            scale = builder.fmul(load(behind(scales, int64(v * _VECTOR)), vector), factor)
            target = behind(sums, builder.mul(int64(r), sums_row), int64(v * _VECTOR))
            product = builder.fmul(builder.sitofp(builder.load(exact[r, v]), vector), scale, flags=("contract",))
            added = builder.fadd(load(target, vector), product, flags=("contract",))
            builder.store(added, builder.bitcast(target, vector.as_pointer())).align = 4
        return context.get_dummy_value()

    index = types.intp
    arrays = (sums, index, index, x, index, index, xs, index, index, words, index, scales, index)
    return types.void(*arrays, index, rows, vectors), lower


@intrinsic
def _wide(typing_context, value):
    """A float32 as it is, or that of a float16's bits in uint16; processors with AVX2 have the instruction."""

    def lower(context, builder, signature, arguments):
        if value == types.float32:
            return arguments[0]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(value), lower


@njit(error_model="numpy", fastmath={"nsz"})
def round_token(x_K, block, byte_K, scale_B, sum_B):
    """Steps 1 and 2 of `kernels/int8.py` for one token, in the order of bytes told above; sum_B: scale times a block's
    sum.

    `byte_K` may have more inputs than x, up to whole blocks: they become 0. A block that holds what is no finite number
    gets a scale of NaN. Its own `fastmath`: divisions and NaN as the definition has them.
    """
    integers = np.empty(block, np.int8)
    for b in range(len(scale_B)):
        start = b * block
        values, rounded = x_K[start : min(start + block, len(x_K))], byte_K[start : start + block]
        largest, broken = _ZERO, _ZERO
        for i in range(len(values)):
            magnitude = abs(values[i])
            largest = magnitude if magnitude > largest else largest
            broken += values[i] - values[i]  # 0, or NaN where a value is no finite number
        inverse = _LARGEST / largest if largest > _ZERO and broken == _ZERO else _ZERO
        count = np.int32(0)
        for i in range(len(values)):
            integer = np.int32(np.rint(values[i] * inverse)) if broken == _ZERO else np.int32(0)
            integers[i] = np.int8(integer)
            count += integer
        for i in range(len(values), block):
            integers[i] = 0
        for i in range(0, block, 8):
            for j in range(4):
                rounded[i + j] = integers[i + 2 * j]
                rounded[i + 4 + j] = integers[i + 2 * j + 1]
        scale = largest / _LARGEST + broken
        scale_B[b] = scale
        sum_B[b] = scale * np.float32(count)


@kernel()
def round_to_bytes(x_MK, block, byte_MK, scale_MB, sum_MB, begin, end):
    """`round_token` for all tokens."""
    if end < 0:
        return share_out(len(x_MK))
    for m in range(begin, end):
        round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])


@kernel()
def multiply_bytes(x_MK, block, byte_MK, scale_MB, sum_MB, words_TWL, scales_TBL, zeros_TBL, out_MN, begin, end):
    """out = x @ weight.T, x (float32) rounded by blocks of so many inputs: here where there are FEW tokens, before by
    `round_to_bytes` where there are more.

    scales_TBL, zeros_TBL: of the weight, in float32 or as the bits of float16, and in uint8. Zero points are taken out
    of the products, as sum (q - zero) x = sum q x - zero sum x.
    """
    num_tokens, num_blocks = scale_MB.shape
    num_tiles, num_pieces = len(words_TWL), (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        if num_tokens < FEW:
            for m in range(num_tokens):
                round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])
        return share_out(num_tiles * num_pieces)
    x = byte_MK.reshape(-1).view(np.int32)  # four bytes each
    xs, sum_x = scale_MB.reshape(-1), sum_MB.reshape(-1)
    x_row, block_q, steps = num_blocks * block // 4, block // 4, block // STEP
    for item in range(begin, end):
        t, first_token = item % num_tiles, item // num_tiles * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words = words_TWL[t].reshape(-1)
        scale_BL, offset_BL = np.empty((num_blocks, LANES), np.float32), np.empty((num_blocks, LANES), np.float32)
        for b in range(num_blocks):
            for n in range(LANES):
                scale = _wide(scales_TBL[t, b, n])
                scale_BL[b, n], offset_BL[b, n] = scale, -(np.float32(zeros_TBL[t, b, n]) * scale)
        scales, offsets = scale_BL.reshape(-1), offset_BL.reshape(-1)
        sum_ML = np.zeros((count, LANES), np.float32)
        sums = sum_ML.reshape(-1)
        for m in range(count):
            at = (first_token + m) * num_blocks
            tile_product(sums, m * LANES, LANES, sum_x, at, num_blocks, 1, offsets, 0, LANES, num_blocks, 1, 8)
        for b in range(num_blocks):
            m, scale_at, word_at = 0, b * LANES, b * steps * _WORDS * LANES
            x_at, xs_at = first_token * x_row + b * block_q, first_token * num_blocks + b
            while m + 4 <= count:
                for n in range(0, LANES, 16):
                    _add_byte_products(
                        sums, m * LANES + n, LANES, x, x_at, x_row, xs, xs_at, num_blocks, words, word_at + n,
                        scales, scale_at + n, steps, 4, 2
                    )  # fmt: skip
                m, x_at, xs_at = m + 4, x_at + 4 * x_row, xs_at + 4 * num_blocks
            if m + 2 <= count:
                for n in range(0, LANES, 32):
                    _add_byte_products(
                        sums, m * LANES + n, LANES, x, x_at, x_row, xs, xs_at, num_blocks, words, word_at + n,
                        scales, scale_at + n, steps, 2, 4
                    )  # fmt: skip
                m, x_at, xs_at = m + 2, x_at + 2 * x_row, xs_at + 2 * num_blocks
            if m < count:
                _add_byte_products(
                    sums, m * LANES, LANES, x, x_at, x_row, xs, xs_at, num_blocks, words, word_at,
                    scales, scale_at, steps, 1, 8
                )  # fmt: skip
        write_tile(sum_ML, out_MN, first_token, t * LANES)
