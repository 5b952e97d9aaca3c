"""The loops of linears on activations rounded to int8, compiled by numba around a processor's products of bytes.

One tile in three forms. `vpdpbusd` (AVX-512 VNNI, AVX-VNNI) multiplies unsigned bytes by signed ones and adds each four
to a sum of 32 bits in one instruction, 64 of them at once. AVX2's `pmaddubsw` multiplies 32 and adds neighbours in 16
bits: with weights of 4 bits, sums of STEP inputs stay in those (15 times 127, two at a time, eight times over, is at
most 30,480) before `pmaddwd` adds them to 32; weights of 8 bits are widened to 16 for it. Integers, so all are exact;
the sums of floats around them have one order; so all forms give the same bits.

Weights lie in tiles of LANES outputs. words_TWL[tile, w] holds consecutive inputs of each lane in 32 bits: four of 8
bits, or eight of 4 bits, of which the first four are the low halves of the bytes and the others the high ones. So a
token's bytes lie in their own order. Apart from the other compiled files, since numba's cache on disk looks at whole
files.

Suffixes: M tokens, K inputs, N outputs, B blocks of inputs, T tiles, W words of a lane, L lanes.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

from dataclasses import dataclass
from functools import cache

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.numerics import bits_of_float, float_of_bits, wide
from pipeline.kernels.cpu.compile.prefetch import ask_for
from pipeline.kernels.cpu.compile.processor import has
from pipeline.kernels.cpu.compile.threads import kernel, share_out
from pipeline.kernels.cpu.linear.compiled_linear import LANES, TOKENS, write_tile

STEP = 32  # inputs whose products AVX2 adds in 16 bits; blocks are multiples of it
NEAR = 512  # inputs whose weights stay in the nearest cache while tokens pass
# Words of a lane by which weights are fetched before they are used: with two tokens or more, processors' own fetching
# falls behind.
AHEAD = 64
FEW = 16  # tokens below which `multiply_bytes` rounds them itself, on one thread: another call takes longer

_LARGEST, _ZERO = np.float32(127.0), np.float32(0.0)
_SIZE_BITS, _INFINITY_BITS = np.uint32(0x7FFFFFFF), np.uint32(0xFF << 23)


@dataclass(frozen=True)
class Form:
    """How a processor multiplies bytes. lanes: 32-bit integers of a vector; in_fours: whether it has `vpdpbusd`; most,
    some, one: tokens and vectors of three tiles whose sums stay in registers, the last one of a single token."""

    name: str
    lanes: int
    in_fours: int
    most: tuple[int, int]
    some: tuple[int, int]
    one: tuple[int, int]


AVX2 = Form("AVX2", 8, 0, (4, 2), (2, 4), (1, 8))
AVX_VNNI = Form("AVX-VNNI", 8, 1, (4, 2), (2, 4), (1, 8))
AVX512_VNNI = Form("AVX-512 VNNI", 16, 1, (4, 4), (2, 4), (1, 4))


def forms_here() -> list[Form]:
    """Those that this processor has the instructions for, the fastest first."""
    needed = {
        AVX512_VNNI: ("avx512f", "avx512bw", "avx512vnni"),
        AVX_VNNI: ("avx2", "fma", "f16c", "avxvnni"),
        AVX2: ("avx2", "fma", "f16c"),
    }
    return [form for form, names in needed.items() if has(*names)]


@intrinsic(prefer_literal=True)
def _add_byte_products(
    typing_context, sums, sums_at, sums_row, x, x_at, x_row, xs, x_sums, xs_at, xs_row, words, words_at, scales, zeros,
    scales_at, steps, bits, lanes, in_fours, rows, vectors
):  # fmt: skip
    """A block of `steps` times STEP inputs, `rows` tokens and `lanes` * `vectors` outputs (all of them, `bits` and
    `in_fours` literals; see `Form`):

        sums[sums_at + r * sums_row + n] += xs[xs_at + r * xs_row] * scales[scales_at + n]
            * (sum over the block's inputs of (token r's byte * output n's integer of `bits` bits)
               - zeros[scales_at + n] * x_sums[xs_at + r * xs_row])

    Arrays are one-dimensional: sums and xs float32; x int32, four bytes of a token each; x_sums int32 within 16 bits;
    words uint32, the next inputs LANES behind; scales float32 or bits of float16; zeros uint8. Indices are not checked.
    """
    literals = bits, lanes, in_fours, rows, vectors
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None
    num_bits, num_lanes, has_fours, num_rows, num_vectors = (literal.literal_value for literal in literals)
    words_of_step = STEP * num_bits // 32
    unrolled = 1 if has_fours else words_of_step

    def lower(context, builder, signature, arguments):
        int8, int16, int32, int64, float32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
        integers, floats = ir.VectorType(int32, num_lanes), ir.VectorType(float32, num_lanes)
        pairs, bytes_ = ir.VectorType(int16, 2 * num_lanes), ir.VectorType(int8, 4 * num_lanes)
        low, ones = ir.Constant(bytes_, [15] * (4 * num_lanes)), ir.Constant(pairs, [1] * (2 * num_lanes))
        four, eight = (ir.Constant(pairs, [shift] * (2 * num_lanes)) for shift in (4, 8))

        def place(array, at):
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            return builder.gep(data, [arguments[at]])

        places = (0, 1), (3, 4), (6, 8), (7, 8), (10, 11), (12, 14), (13, 14)
        sums, x, xs, x_sums, words, scales, zeros = (place(*each) for each in places)
        sums_row, x_row, xs_row, steps = (arguments[at] for at in (2, 5, 9, 15))

        def behind(address, *offsets):
            for offset in offsets:
                address = builder.gep(address, [offset])
            return address

        def load(address, element):
            loaded = builder.load(builder.bitcast(address, ir.VectorType(element, num_lanes).as_pointer()))
            loaded.align = 1
            return loaded

        def of_row(address, r, row):
            """A value of token r in all lanes."""
            value = builder.load(behind(address, builder.mul(int64(r), row)))
            kind = ir.VectorType(value.type, num_lanes)
            single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, int32(0))
            return builder.shuffle_vector(single, single, ir.Constant(integers, [0] * num_lanes))

        def call(name, result, *values):
            kind = ir.FunctionType(result, [value.type for value in values])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), values)

        def add_pairs(one, other):
            name = "x86.avx512.pmaddw.d.512" if num_lanes == 16 else "x86.avx2.pmadd.wd"
            return call(name, integers, *(builder.bitcast(each, pairs) for each in (one, other)))

        def unpack(packed):
            """A word's inputs as bytes, four by four."""
            if num_bits == 8:
                return [packed]
            halves = packed, builder.lshr(builder.bitcast(packed, pairs), four)
            return [builder.bitcast(builder.and_(builder.bitcast(half, bytes_), low), integers) for half in halves]

        cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
        exact = {cell: cgutils.alloca_once(builder, integers) for cell in cells}  # become registers
        in_16_bits = {}

        def add_fours(cell, weight, value):
            if has_fours:
                total = call(
                    f"x86.avx512.vpdpbusd.{32 * num_lanes}", integers, builder.load(exact[cell]), weight, value
                )
            elif num_bits == 8:
                weight, value = builder.bitcast(weight, pairs), builder.bitcast(value, pairs)
                odd = add_pairs(builder.lshr(weight, eight), builder.ashr(value, eight))
                weight, value = (builder.shl(each, eight) for each in (weight, value))
                even = add_pairs(builder.lshr(weight, eight), builder.ashr(value, eight))
                total = builder.add(builder.load(exact[cell]), builder.add(odd, even))
            else:
                product = call("x86.avx2.pmadd.ub.sw", pairs, *(builder.bitcast(e, bytes_) for e in (weight, value)))
                in_16_bits[cell] = builder.add(in_16_bits[cell], product) if cell in in_16_bits else product
                return
            builder.store(total, exact[cell])

        # Float sums of the block before are stored anyway; without this they are kept, in registers that sums of
        # integers need.
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
        # The zero point's share first, as one of two products of 16 bits; the other has the zero point's high half, 0.
        zero_V = [builder.zext(load(behind(zeros, int64(v * num_lanes)), int8), integers) for v in range(num_vectors)]
        for r in range(num_rows):
            less = builder.neg(of_row(x_sums, r, xs_row))
            for v in range(num_vectors):
                builder.store(add_pairs(zero_V[v], less), exact[r, v])
        with cgutils.for_range(builder, builder.mul(steps, int64(words_of_step // unrolled))) as loop:
            first_word = behind(words, builder.mul(loop.index, int64(unrolled * LANES)))
            first_x = behind(x, builder.mul(loop.index, int64(unrolled * 8 // num_bits)))
            for w in range(unrolled):
                weight_V = []
                for v in range(num_vectors):
                    at = w * LANES + v * num_lanes
                    if v * num_lanes % 16 == 0:  # a line of the cache
                        ask_for(builder, behind(first_word, int64(at + AHEAD * LANES)))
                    weight_V.append(unpack(load(behind(first_word, int64(at)), int32)))
                for part in range(8 // num_bits):
                    for r in range(num_rows):
                        value = of_row(behind(first_x, int64(w * 8 // num_bits + part)), r, x_row)
                        for v in range(num_vectors):
                            add_fours((r, v), weight_V[v][part], value)
            for cell, total in in_16_bits.items():
                builder.store(builder.add(builder.load(exact[cell]), add_pairs(total, ones)), exact[cell])
        scale_V = []
        for v in range(num_vectors):
            is_narrow = signature.args[12].dtype == types.uint16
            loaded = load(behind(scales, int64(v * num_lanes)), ir.HalfType() if is_narrow else float32)
            scale_V.append(builder.fpext(loaded, floats) if is_narrow else loaded)
        for r in range(num_rows):
            factor = of_row(xs, r, xs_row)
            for v in range(num_vectors):
                target = behind(sums, builder.mul(int64(r), sums_row), int64(v * num_lanes))
                scale, integer = builder.fmul(scale_V[v], factor), builder.sitofp(builder.load(exact[r, v]), floats)
                product = builder.fmul(integer, scale, flags=("contract",))
                added = builder.fadd(load(target, float32), product, flags=("contract",))
                builder.store(added, builder.bitcast(target, floats.as_pointer())).align = 4
        return context.get_dummy_value()

    index = types.intp
    arrays = (sums, index, index, x, index, index, xs, x_sums, index, index, words, index, scales, zeros, index)
    return types.void(*arrays, index, *literals), lower


@njit(error_model="numpy", fastmath={"nsz"})
def round_token(x_K, block, byte_K, scale_B, sum_B):
    """Steps 1 and 2 of `kernels/int8.py` for one token, in float32 or bits of bfloat16; sum_B: of a block's integers.

    `byte_K` may have more inputs than x, up to whole blocks: they become 0. A block that holds what is no finite number
    gets a scale of NaN. Its own `fastmath`: divisions as the definition has them.
    """
    for b in range(len(scale_B)):
        start = b * block
        values, rounded = x_K[start : min(start + block, len(x_K))], byte_K[start : start + block]
        most = np.uint32(0)  # bits of the largest size; those of infinity and of a NaN are larger than any number's
        for i in range(len(values)):
            most = max(most, bits_of_float(wide(values[i])) & _SIZE_BITS)
        largest, is_sound = float_of_bits(most), most < _INFINITY_BITS
        inverse = _LARGEST / largest if is_sound and largest > _ZERO else _ZERO
        count = np.int32(0)
        for i in range(len(values)):
            integer = np.int32(np.rint(wide(values[i]) * inverse)) if is_sound else np.int32(0)
            rounded[i] = np.int8(integer)
            count += integer
        for i in range(len(values), block):
            rounded[i] = 0
        scale_B[b], sum_B[b] = largest / _LARGEST if is_sound else np.float32(np.nan), count


@kernel()
def round_to_bytes(x_MK, block, byte_MK, scale_MB, sum_MB, begin, end):
    """`round_token` for all tokens."""
    if end < 0:
        return share_out(len(x_MK))
    for m in range(begin, end):
        round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])


@cache
def multiply_in(form: Form, bits: int) -> Dispatcher:
    """The kernel `multiply_bytes` in a form, for weights of so many bits."""
    lanes, in_fours, (most, most_vectors), (some, some_vectors) = form.lanes, form.in_fours, form.most, form.some
    one, one_vectors = form.one

    @kernel()
    def multiply_bytes(
        x_MK, block, byte_MK, scale_MB, sum_MB, words_TWL, scales_TBL, zeros_TBL, bias_TL, out_MN, begin, end
    ):
        """out = x @ weight.T + bias, x rounded by blocks of so many inputs: here where there are FEW tokens, before by
        `round_to_bytes` where there are more.

        x and out in float32 or bits of bfloat16. scales_TBL, zeros_TBL: of the weight, in float32 or as the bits of
        float16, and in uint8. Zero points are taken out of the products, as sum (q - zero) x = sum q x - zero sum x.
        """
        num_tokens, num_blocks = scale_MB.shape
        num_tiles, num_pieces = len(words_TWL), (num_tokens + TOKENS - 1) // TOKENS
        if end < 0:
            if num_tokens < FEW:
                for m in range(num_tokens):
                    round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])
            return share_out(num_tiles * num_pieces)
        x = byte_MK.reshape(-1).view(np.int32)  # four bytes each
        xs, x_sums = scale_MB.reshape(-1), sum_MB.reshape(-1)
        x_row, block_x, steps, near = num_blocks * block // 4, block // 4, block // STEP, NEAR // block
        block_words = block * bits // 32 * LANES
        for item in range(begin, end):
            t, first_token = item % num_tiles, item // num_tiles * TOKENS
            count = min(TOKENS, num_tokens - first_token)
            words, scales, zeros = words_TWL[t].reshape(-1), scales_TBL[t].reshape(-1), zeros_TBL[t].reshape(-1)
            sum_ML, bias_L = np.empty((count, LANES), np.float32), bias_TL[t]
            sums = sum_ML.reshape(-1)
            for m in range(count):
                sum_L = sum_ML[m]
                for n in range(LANES):
                    sum_L[n] = bias_L[n]
            for first_block in range(0, num_blocks, near):
                end_block, m = min(first_block + near, num_blocks), 0
                while m + most <= count:
                    for n in range(0, LANES, most_vectors * lanes):
                        for b in range(first_block, end_block):
                            _add_byte_products(
                                sums, m * LANES + n, LANES, x, (first_token + m) * x_row + b * block_x, x_row,
                                xs, x_sums, (first_token + m) * num_blocks + b, num_blocks, words, b * block_words + n,
                                scales, zeros, b * LANES + n, steps, bits, lanes, in_fours, most, most_vectors
                            )  # fmt: skip
                    m += most
                while m + some <= count:
                    for n in range(0, LANES, some_vectors * lanes):
                        for b in range(first_block, end_block):
                            _add_byte_products(
                                sums, m * LANES + n, LANES, x, (first_token + m) * x_row + b * block_x, x_row,
                                xs, x_sums, (first_token + m) * num_blocks + b, num_blocks, words, b * block_words + n,
                                scales, zeros, b * LANES + n, steps, bits, lanes, in_fours, some, some_vectors
                            )  # fmt: skip
                    m += some
                while m < count:
                    for n in range(0, LANES, one_vectors * lanes):
                        for b in range(first_block, end_block):
                            _add_byte_products(
                                sums, m * LANES + n, LANES, x, (first_token + m) * x_row + b * block_x, x_row,
                                xs, x_sums, (first_token + m) * num_blocks + b, num_blocks, words, b * block_words + n,
                                scales, zeros, b * LANES + n, steps, bits, lanes, in_fours, one, one_vectors
                            )  # fmt: skip
                    m += one
            write_tile(sum_ML, out_MN, first_token, t * LANES)

    return multiply_bytes
