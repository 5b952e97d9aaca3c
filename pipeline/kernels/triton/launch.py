"""A kernel launch as data: the same launches are run, compiled without a GPU, and tested."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.kernels.cache import FP8, LayerCache

_KIB = 1024


@dataclass(frozen=True)
class CompileTarget:
    """Properties of a device that tile sizes and grids depend on."""

    capability: tuple[int, int]
    num_multiprocessors: int
    max_shared_bytes: int  # per block

    @classmethod
    def from_device(cls, device: torch.device) -> "CompileTarget":
        """Return the target of `device`; for a CPU, where kernels run in Triton's interpreter, that of a small GPU."""
        if device.type != "cuda":
            return cls((8, 0), 4, shared_bytes_of((8, 0)))
        capability = torch.cuda.get_device_capability(device)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(capability, count, shared_bytes_of(capability))

    @property
    def has_wgmma(self) -> bool:
        return self.capability[0] == 9

    @property
    def converts_fp8(self) -> bool:
        """Support for instructions that convert two FP8 codes to float16 (PTX ISA, `cvt`)."""
        return self.capability >= (8, 9)


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Return the maximum shared memory of one block in bytes (CUDA C++ Programming Guide, technical specifications per
    compute capability). An unknown capability gets the smallest value."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) * _KIB


A100 = CompileTarget((8, 0), 108, shared_bytes_of((8, 0)))
H100 = CompileTarget((9, 0), 132, shared_bytes_of((9, 0)))


@dataclass(frozen=True)
class Launch:
    """Launch of `kernel` over `grid` with positional `arguments` (tensors, numbers) and compile-time `constants`.

    Triton recompiles a kernel, which takes seconds, for integers that are 1 or multiples of 16 and for tensors aligned
    to 16 bytes. So arguments that change from step to step are listed in its `do_not_specialize`, or are aligned.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> Any:
        """Launch, and return what Triton compiled; None in its interpreter. In `recording` only record the launch."""
        record = _record.get()
        if record is not None:
            record(self)
            return None
        return self.kernel[self.grid](*self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernel."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


_record: ContextVar[Callable[[Launch], object] | None] = ContextVar("record of launches", default=None)


@contextmanager
def recording(record: Callable[[Launch], object]) -> Iterator[None]:
    """Pass this thread's launches to `record` instead of running them. Their output tensors stay unchanged.

    The code that launches kernels thus also lists what to compile. A launch refers to its tensors, so keeping the
    launches of many steps keeps their memory.
    """
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def cache_arguments(cache: LayerCache) -> tuple[torch.Tensor | None, ...]:
    """Return keys, values and their scales as kernel arguments: FP8 codes as bytes, None without scales."""
    assert all(tensor.is_contiguous() for tensor in cache.tensors)
    stored = (s.view(torch.int8) if s.dtype == FP8 else s for s in (cache.k_CBKD, cache.v_CBKD))
    return *stored, cache.k_scale_CKB, cache.v_scale_CKB


def power_of_two(number: int, minimum: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and `minimum`, a power of two itself."""
    return max(minimum, 1 << (number - 1).bit_length())
