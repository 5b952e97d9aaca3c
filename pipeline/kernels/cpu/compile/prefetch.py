"""Asking for memory before it is needed, where the processor does not foresee it."""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LINE = 64  # bytes


def ask_for(builder, address, near: bool = True) -> None:
    """In LLVM's own terms: the cache line of an address, which need not exist, for the nearest cache or the second."""
    byte_address, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte_address, int32, int32, int32])
    to_read, nearness, data_cache = int32(0), int32(3 if near else 2), int32(1)
    asks = builder.module.declare_intrinsic("llvm.prefetch", [byte_address], kind)
    builder.call(asks, [builder.bitcast(address, byte_address), to_read, nearness, data_cache])


@intrinsic
def _ask_for_element(typing_context, array, at):
    def lower(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        ask_for(builder, builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), lower


@njit(inline="always")
def ask_for_row(array, at, count):
    """So many elements of a flat array, from `at` on, for the nearest cache."""
    for i in range(0, count, _LINE // array.itemsize):
        _ask_for_element(array, at + i)
