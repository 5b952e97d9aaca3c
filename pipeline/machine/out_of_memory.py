"""How a failed allocation shows, in the host's memory or a device's. No torch: who asks may not have loaded it."""

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed in a way after which the process is as sound as before.

    torch's allocator for a device raises its OutOfMemoryError, which is known by name. Others have no type of their own
    for this and raise a bare RuntimeError, so its message has to be read: torch's CPU allocator, cuBLAS, which
    allocates a workspace with its first product of a stream, and Triton, whose kernels need memory when they are loaded
    and for registers that were spilled. None of them has started any work then. Other device errors may leave the
    device in an unknown state and are not among these.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _MESSAGES)
