"""Compilation of kernels, and the partition of their work among threads.

The last arguments of a kernel are `begin` and `end`, the range of items of one thread. Callers pass ALL_ITEMS. The
kernel then only passes its number of items to `parallel_for`, which calls the same kernel again on each thread:

    @kernel()
    def double(x_TH, begin, end):
        if end < 0:
            return parallel_for(len(x_TH))
        for t in range(begin, end):
            ...

numba's `prange` would do the same, but it wraps a kernel in functions that each contain a copy of its loops, which are
optimized and compiled again: that took about three times as long.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import threading
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import config, get_num_threads, njit, set_num_threads, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic

from pipeline.kernels.cpu.compile.versions import made_of_imports
from pipeline.machine.threads import is_spin_bounded, load_tbb

PARALLEL_ELEMENTS = 1 << 15
"""Elementwise work below this stays on one thread: waking another one costs more than it saves."""
ALL_ITEMS = 0, -1
"""`begin` and `end` from a kernel's caller: all items, partitioned among the threads that `use_threads` set."""

# Sums may be reordered, as in any vectorised sum; NaN and infinity keep their meaning.
_options: dict[str, Any] = {
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


def kernel(**changed: Any) -> Callable[[Callable[..., None]], Dispatcher]:
    """Decorate a kernel: numba compiles it on the first call for each combination of types, and caches it on disk.

    `changed` overrides options of `njit` that all kernels share.
    """

    def compiled(function: Callable[..., None]) -> Dispatcher:
        return njit(**_options | changed)(made_of_imports(function))

    return compiled


@intrinsic
def parallel_for(typing_context, num_items):
    """Partition items 0 to num_items - 1 among the threads, in equal runs.

    Each run is a call of the kernel that calls this function, with its other arguments unchanged. The kernel must do
    nothing afterwards. It uses the function of numba's parallel loops, whichever threading layer is active. Call
    `use_threads`, which starts the threads, before any kernel.
    """

    def lower(context, builder, signature, arguments):
        (num_items,) = arguments
        kernel, module = builder.function, builder.module
        int64, address = ir.IntType(64), ir.IntType(8).as_pointer()
        returned, raised, *others, begin, end = kernel.args  # numba's calling convention
        assert begin.type == end.type == int64, "a kernel's last arguments are begin and end"

        def run(builder, others, begin, end):
            """Call the kernel on some items. Kernels return nothing and raise nothing."""
            results = [cgutils.alloca_once(builder, each.type.pointee, zfill=True) for each in (returned, raised)]
            builder.call(kernel, [*results, *others, begin, end])

        # passed to each thread: the arguments, the number of items and the number of runs
        given = ir.LiteralStructType([*(each.type for each in others), int64, int64])
        kind = ir.FunctionType(ir.VoidType(), [address.as_pointer(), int64.as_pointer(), int64.as_pointer(), address])
        some = ir.Function(module, kind, name=f"{kernel.name}.some")
        some.linkage = "internal"
        inner = ir.IRBuilder(some.append_basic_block())
        held = inner.load(inner.bitcast(some.args[3], given.as_pointer()))
        *passed, items, runs = (inner.extract_value(held, i) for i in range(len(given.elements)))
        first = inner.ptrtoint(inner.load(some.args[0]), int64)
        last = inner.add(first, inner.load(some.args[1]))
        run(inner, passed, *(inner.sdiv(inner.mul(items, each), runs) for each in (first, last)))
        inner.ret_void()

        threads_kind = ir.FunctionType(int64, [])
        num_threads = builder.call(cgutils.get_or_insert_function(module, threads_kind, "get_num_threads"), [])
        with builder.if_else(builder.icmp_signed(">", num_threads, int64(1))) as (several, one):
            with several:
                closure = cgutils.alloca_once(builder, given)
                for i, value in enumerate([*others, num_items, num_threads]):
                    builder.store(value, cgutils.gep_inbounds(builder, closure, 0, i))
                # An "array" with one byte per element that begins at address 0: the address is the number of the run.
                nothing, one_byte = ir.Constant(address, None), int64(1)
                starts, sizes, steps = (cgutils.alloca_once_value(builder, v) for v in (nothing, num_threads, one_byte))
                kind = ir.FunctionType(ir.VoidType(), [address] * 5 + [int64] * 3)
                parallel_for = cgutils.get_or_insert_function(module, kind, "numba_parallel_for")
                passed = [builder.bitcast(each, address) for each in (some, starts, sizes, steps, closure)]
                inner_dimensions, arrays = int64(0), int64(1)
                builder.call(parallel_for, [*passed, inner_dimensions, arrays, num_threads])
            with one:
                run(builder, others, int64(0), num_items)
        return context.get_dummy_value()

    return types.none(types.int64), lower


def init_thread_pool() -> None:
    """Start numba's threads, on oneTBB if torch's threads do not spin (`machine.threads`).

    Keeps torch's number of threads: libgomp runs the threads of both, and starting numba's sets its number to all
    cores, also for torch.
    """
    config.THREADING_LAYER_PRIORITY = threading_layers()  # pyright: ignore[reportAttributeAccessIssue]
    threads = torch.get_num_threads()
    get_num_threads()
    torch.set_num_threads(threads)


def threading_layers() -> list[str]:
    """Return numba's three threading layers, the preferred one first. Loads oneTBB if that is the first."""
    return ["tbb", "omp", "workqueue"] if is_spin_bounded() and load_tbb() else ["omp", "workqueue", "tbb"]


def use_threads(parallel: bool) -> int:
    """Run the next kernels on torch's number of threads, or on one; return the number of threads."""
    max_threads = config.NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]
    num_threads = min(torch.get_num_threads(), max_threads) if parallel else 1
    if num_threads != getattr(_current, "num_threads", None):
        set_num_threads(num_threads)
        _current.num_threads = num_threads
    return num_threads


_current = threading.local()  # numba's number of threads is thread-local too; setting it again takes 10 us
