"""Host memory: copies between host and device that do not wait for the device, and pages on CPU."""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

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


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU each page takes memory and time only when it is first written, and Linux may use pages of
    2 MiB."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = torch.frombuffer(mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=torch.uint8)
    advise_huge_pages(pages)
    return pages.view(dtype).view(shape)


_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Allow Linux to back a CPU tensor with pages of 2 MiB. Call it before the first write; a no-op elsewhere."""
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and stop > start:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
