"""A small matrix product whose sums stay in registers, in LLVM's own terms: what attention and linears are built of."""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.prefetch import ask_for
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS

_UNIT = 8  # float32 values in which vectors are counted; where the processor has wider ones, two are one
_LINE_BITS = 512  # of a cache line
STORED = {types.float32: ir.FloatType(), types.uint16: ir.IntType(16), types.uint8: ir.IntType(8)}


def widened(builder, value, dtype):
    """LLVM's instructions for `wide` (see `numerics.py`) of one value of an array, or of a vector of them."""
    if dtype == types.float32:
        return value
    num_lanes = value.type.count if isinstance(value.type, ir.VectorType) else 0

    def of_lanes(kind):
        return ir.VectorType(kind, num_lanes) if num_lanes else kind

    def same(kind, number):
        return ir.Constant(of_lanes(kind), [number] * num_lanes if num_lanes else number)

    int32, float32 = ir.IntType(32), ir.FloatType()
    bits = builder.zext(value, of_lanes(int32))
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(bits, same(int32, 16)), of_lanes(float32))
    size = builder.shl(builder.and_(bits, same(int32, 0x7F)), same(int32, 20))
    sign = builder.shl(builder.and_(bits, same(int32, 0x80)), same(int32, 24))
    return builder.fmul(builder.bitcast(builder.or_(size, sign), of_lanes(float32)), same(float32, 2.0**120))


@intrinsic(prefer_literal=True)
def tile_product(typing_context, out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth, rows, vectors):
    """A small matrix product whose sums stay in registers: for r < rows and n < 8 * vectors (both literals)

        out[out_at + r * out_row + n] += sum over d < depth of
            a[a_at + r * a_row + d * a_step] * b[b_at + d * b_row + n]

    Arrays are one-dimensional; out is float32, a and b may be bfloat16 or FP8 codes. Indices are not checked. The order
    of sums is the same for all `rows` and `vectors`.
    Written in LLVM's own terms because its loop vectorizer keeps no two-dimensional tile of sums in registers. With a
    depth of 64 or more and rows * vectors = 8 it runs at the rate of the processor's multipliers, with twice as many
    or more registers (`HAS_WIDE_VECTORS`) at rows * vectors = 32.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(vectors, types.IntegerLiteral):
        return None
    index = types.intp
    arguments = (out, index, index, a, index, index, index, b, index, index, index, rows, vectors)
    return types.void(*arguments), _lowered(rows.literal_value, vectors.literal_value)


@intrinsic(prefer_literal=True)
def tile_product_ahead(
    typing_context, out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth, rows, vectors, ahead
):
    """`tile_product` that asks for the memory `ahead` elements behind each of b, too: what comes next lies elsewhere,
    and asked for all at once it would be waited for."""
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(vectors, types.IntegerLiteral):
        return None
    index = types.intp
    arguments = (out, index, index, a, index, index, index, b, index, index, index, rows, vectors, index)
    return types.void(*arguments), _lowered(rows.literal_value, vectors.literal_value)


def _lowered(num_rows, num_units):
    """What `intrinsic` makes code by."""

    def lower(context, builder, signature, arguments):
        kinds = {"out": signature.args[0], "a": signature.args[3], "b": signature.args[7]}
        out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth = arguments[:11]
        pointer = {
            name: builder.gep(context.make_array(kinds[name])(context, builder, value).data, [at])
            for name, value, at in (("out", out, out_at), ("a", a, a_at), ("b", b, b_at))
        }
        int64, float32, int32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
        is_wide = HAS_WIDE_VECTORS and num_units % 2 == 0
        width, num_vectors = (2 * _UNIT, num_units // 2) if is_wide else (_UNIT, num_units)
        vector = ir.VectorType(float32, width)
        flags = ("contract", "reassoc", "nsz", "arcp")

        def load(place, dtype):
            """One vector, widened."""
            kind = ir.VectorType(STORED[dtype], width)
            loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
            loaded.align = dtype.bitwidth // 8
            return widened(builder, loaded, dtype)

        def load_everywhere(place, dtype):
            """One value in all places of a vector."""
            value = widened(builder, builder.load(place), dtype)
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, int32(0))
            return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(int32, width), [0] * width))

        def store(value, place):
            builder.store(value, builder.bitcast(place, vector.as_pointer())).align = 4

        place_RV, sum_RV = [], []
        for r in range(num_rows):
            row = builder.gep(pointer["out"], [builder.mul(int64(r), out_row)])
            place_RV.append([builder.gep(row, [int64(v * width)]) for v in range(num_vectors)])
            sum_RV.append([cgutils.alloca_once(builder, vector) for _ in range(num_vectors)])  # becomes a register
            for place, held in zip(place_RV[-1], sum_RV[-1]):
                builder.store(load(place, types.float32), held)
        a_R = [builder.gep(pointer["a"], [builder.mul(int64(r), a_row)]) for r in range(num_rows)]
        with cgutils.for_range(builder, depth) as loop:
            b_row_d = builder.gep(pointer["b"], [builder.mul(loop.index, b_row)])
            b_at_V = [builder.gep(b_row_d, [int64(v * width)]) for v in range(num_vectors)]
            b_V = [load(at, kinds["b"].dtype) for at in b_at_V]
            if len(arguments) > 13:
                vectors_a_line = max(1, _LINE_BITS // (width * kinds["b"].dtype.bitwidth))
                for at in b_at_V[::vectors_a_line]:
                    ask_for(builder, builder.gep(at, [arguments[13]]))
            step = builder.mul(loop.index, a_step)
            for r in range(num_rows):
                value = load_everywhere(builder.gep(a_R[r], [step]), kinds["a"].dtype)
                for v in range(num_vectors):
                    product = builder.fmul(value, b_V[v], flags=flags)
                    builder.store(builder.fadd(builder.load(sum_RV[r][v]), product, flags=flags), sum_RV[r][v])
        for places, sums in zip(place_RV, sum_RV):
            for place, held in zip(places, sums):
                store(builder.load(held), place)
        return context.get_dummy_value()

    return lower
