"""Host memory: copies between host and device that do not wait for the device, and huge pages on CPU."""

import ctypes
import sys
from contextlib import suppress

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` as a tensor on `device`: the same memory on a CPU, else a copy queued after the device's work.

    A copy from pageable memory would first wait until the device is idle. torch keeps the pinned memory alive until the
    copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, queued after the device's work; for a CPU tensor, the tensor itself."""
    return tensor.to("cpu", non_blocking=True)


def staging_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Allocate int32 host memory, pinned if a GPU copies from it. torch keeps it alive until its copy is done."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")


_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Allow Linux to back a CPU tensor with pages of 2 MiB. Call it before the first write; a no-op elsewhere."""
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and stop > start:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
