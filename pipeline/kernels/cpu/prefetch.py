"""Asking for memory before it is needed, where the processor does not foresee it."""

from llvmlite import ir


def ask_for(builder, address, near: bool = True) -> None:
    """In LLVM's own terms: the cache line of an address, which need not exist, for the nearest cache or the second."""
    byte_address, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte_address, int32, int32, int32])
    to_read, nearness, data_cache = int32(0), int32(3 if near else 2), int32(1)
    asks = builder.module.declare_intrinsic("llvm.prefetch", [byte_address], kind)
    builder.call(asks, [builder.bitcast(address, byte_address), to_read, nearness, data_cache])
