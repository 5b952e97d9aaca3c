"""Huge pages for the KV cache on CPU: it is read in scattered blocks, which then take fewer address look-ups."""

import ctypes
import sys
from contextlib import suppress

import torch

_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Before a CPU tensor is first written: Linux may back it by pages of 2 MiB. Without effect where it does not."""
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and stop > start:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
