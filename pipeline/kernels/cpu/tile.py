"""A small matrix product whose sums stay in registers, in LLVM's own terms: what attention of prompts and linears are
built of."""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_VECTOR = 8  # float32 values of a vector; processors with wider or narrower ones get them joined or split


@intrinsic(prefer_literal=True)
def tile_product(typing_context, out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth, rows, vectors):
    """A small matrix product whose sums stay in registers: for r < rows and n < 8 * vectors (both literals)

        out[out_at + r * out_row + n] += sum over d < depth of
            a[a_at + r * a_row + d * a_step] * b[b_at + d * b_row + n]

    Arrays are one-dimensional; out is float32, a and b may be bfloat16, a also FP8 codes. Indices are not checked.
    Written in LLVM's own terms because its loop vectorizer keeps no two-dimensional tile of sums in registers; with
    rows * vectors = 8 and a depth of 64 or more it runs at the rate of the processor's multipliers.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(vectors, types.IntegerLiteral):
        return None
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def lower(context, builder, signature, arguments):
        kinds = {"out": signature.args[0], "a": signature.args[3], "b": signature.args[7]}
        out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth = arguments[:11]
        pointer = {
            name: builder.gep(context.make_array(kinds[name])(context, builder, value).data, [at])
            for name, value, at in (("out", out, out_at), ("a", a, a_at), ("b", b, b_at))
        }
        int64, float32, int32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
        vector, words = ir.VectorType(float32, _VECTOR), ir.VectorType(int32, _VECTOR)
        flags = ("contract", "reassoc", "nsz", "arcp")

        def load(place, dtype):
            """One vector, widened."""
            halves = dtype == types.uint16
            kind = ir.VectorType(ir.IntType(16), _VECTOR) if halves else vector
            loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
            loaded.align = 2 if halves else 4
            if not halves:
                return loaded
            shift = ir.Constant(words, [16] * _VECTOR)
            return builder.bitcast(builder.shl(builder.zext(loaded, words), shift), vector)

        def load_everywhere(place, dtype):
            """One value in all places of a vector."""
            value = builder.load(place)
            if dtype == types.uint16:
                value = builder.bitcast(builder.shl(builder.zext(value, int32), int32(16)), float32)
            if dtype == types.uint8:  # see `wide_code`
                code = builder.zext(value, int32)
                size = builder.shl(builder.and_(code, int32(0x7F)), int32(20))
                sign = builder.shl(builder.and_(code, int32(0x80)), int32(24))
                value = builder.fmul(builder.bitcast(builder.or_(size, sign), float32), float32(2.0**120))
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, int32(0))
            return builder.shuffle_vector(single, single, ir.Constant(words, [0] * _VECTOR))

        def store(value, place):
            builder.store(value, builder.bitcast(place, vector.as_pointer())).align = 4

        place_RV, sum_RV = [], []
        for r in range(num_rows):
            row = builder.gep(pointer["out"], [builder.mul(int64(r), out_row)])
            place_RV.append([builder.gep(row, [int64(v * _VECTOR)]) for v in range(num_vectors)])
            sum_RV.append([cgutils.alloca_once(builder, vector) for _ in range(num_vectors)])  # becomes a register
            for place, held in zip(place_RV[-1], sum_RV[-1]):
                builder.store(load(place, types.float32), held)
        a_R = [builder.gep(pointer["a"], [builder.mul(int64(r), a_row)]) for r in range(num_rows)]
        with cgutils.for_range(builder, depth) as loop:
            b_row_d = builder.gep(pointer["b"], [builder.mul(loop.index, b_row)])
            b_V = [load(builder.gep(b_row_d, [int64(v * _VECTOR)]), kinds["b"].dtype) for v in range(num_vectors)]
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

    index = types.intp
    arguments = (out, index, index, a, index, index, index, b, index, index, index, rows, vectors)
    return types.void(*arguments), lower
