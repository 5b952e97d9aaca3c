"""Recognize failed allocations in host or device memory, without importing torch."""

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is a failed allocation that leaves the process in a sound state.

    torch's device allocator raises OutOfMemoryError, recognized by name. Others raise a bare RuntimeError, so the
    message must be matched: torch's CPU allocator, cuBLAS (which allocates a workspace with the first product of a
    stream), and Triton (whose kernels need memory for loading and for spilled registers). None of them has started any
    work at that point. Other device errors may leave the device in an unknown state and do not count.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _MESSAGES)
