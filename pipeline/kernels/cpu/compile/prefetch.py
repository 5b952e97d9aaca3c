"""Prefetching of memory that the processor does not predict."""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LINE = 64  # bytes


def prefetch(builder, address, near: bool = True) -> None:
    """Emit LLVM's prefetch of an address's cache line, into the first or second cache. The address may be invalid."""
    byte_address, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte_address, int32, int32, int32])
    to_read, nearness, data_cache = int32(0), int32(3 if near else 2), int32(1)
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte_address], kind)
    builder.call(function, [builder.bitcast(address, byte_address), to_read, nearness, data_cache])


@intrinsic
def _prefetch_element(typing_context, array, at):
    def lower(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        prefetch(builder, builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), lower


@njit(inline="always")
def prefetch_row(array, at, count):
    """Prefetch `count` elements of a flat array, from `at` on, into the first cache."""
    for i in range(0, count, _LINE // array.itemsize):
        _prefetch_element(array, at + i)
