"""A small matrix product of arrays with any strides, the basis of attention and the float32 linears."""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from numba import types
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.prefetch import prefetch
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.tiles.register_tile import Bf16PairDot, FloatDot, register_tile
from pipeline.kernels.cpu.tiles.vector_code import FLOAT, STORED, VectorCode

_UNIT = 8  # float32 values per unit of `units`; a wider vector is two units
_LINE_BITS = 512  # of a cache line


@intrinsic(prefer_literal=True)
def tile_product(
    typing_context, out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth, ahead, rows, units
):
    """Add a small matrix product to `out`. For r < rows and n < 8 * units (both literals)

        out[out_at + r * out_row + n] += sum over d < depth of
            a[a_at + r * a_row + d * a_step] * b[b_at + d * b_row + n]

    Arrays are contiguous. out is float32; a and b are float32, bfloat16 or FP8 codes, or both are pairs of bfloat16 in
    uint32 (`add_pairs`). Indices are not checked. The order of sums is the same for all `rows` and `units`. Unless
    `ahead` is None, the memory `ahead` elements after each element of b is prefetched, a little in each step: useful if
    the processor does not predict what is read next. Prefetching all of it at once would stall.

    With a depth of 64 or more it reaches the rate of the processor's multipliers at rows * units = 8, or 32 with
    vectors of 512 bits (`HAS_WIDE_VECTORS`).
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(units, types.IntegerLiteral):
        return None
    num_rows, num_units = rows.literal_value, units.literal_value
    is_wide = HAS_WIDE_VECTORS and num_units % 2 == 0
    width, num_vectors = (2 * _UNIT, num_units // 2) if is_wide else (_UNIT, num_units)

    def lower(context, builder, signature, arguments):
        code = VectorCode(context, builder, signature, arguments)
        out, a, b = code.element_address(0, 1), code.element_address(3, 4), code.element_address(7, 8)
        _, _, out_row, _, _, a_row, a_step, _, _, b_row, depth, ahead = arguments[:12]
        a_dtype, b_dtype = signature.args[3].dtype, signature.args[7].dtype
        are_pairs = b_dtype == types.uint32
        address = {
            (r, v): code.after(out, code.times(r, out_row), v * width)
            for r in range(num_rows)
            for v in range(num_vectors)
        }
        a_R = [code.after(a, code.times(r, a_row)) for r in range(num_rows)]

        def operands(step):
            b_at_V = [code.after(b, builder.mul(step, b_row), v * width) for v in range(num_vectors)]
            b_V = [code.load(at, STORED[b_dtype], width) for at in b_at_V]
            if not isinstance(signature.args[11], types.NoneType):
                for at in b_at_V[:: max(1, _LINE_BITS // (width * b_dtype.bitwidth))]:
                    prefetch(builder, code.after(at, ahead))
            a_step_d = builder.mul(step, a_step)

            def value_of(r):
                value = builder.load(code.after(a_R[r], a_step_d))
                return code.everywhere(value if are_pairs else code.widened(value, a_dtype), width)

            yield value_of, b_V if are_pairs else [code.widened(b, b_dtype) for b in b_V]

        start = {cell: code.load(at, FLOAT, width) for cell, at in address.items()}
        dot = Bf16PairDot(code) if are_pairs else FloatDot(code)
        for cell, total in register_tile(dot, start, depth, operands).items():
            code.store(total, address[cell])
        return context.get_dummy_value()

    index = types.intp
    arguments = (out, index, index, a, index, index, index, b, index, index, index)
    return types.void(*arguments, ahead, rows, units), lower
