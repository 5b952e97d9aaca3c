"""One launch of a kernel as data, so that what runs, what is compiled without a GPU and what is tested are the same."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.kernels.cache import FP8, LayerCache

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """What tile sizes and grids depend on."""

    capability: tuple[int, int]
    num_multiprocessors: int
    max_shared_bytes: int  # of one block

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        """The device's own; of a CPU, where kernels run in Triton's interpreter, a small GPU's."""
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
        """Has instructions that convert two FP8 codes to float16 (PTX ISA, `cvt`)."""
        return self.capability >= (8, 9)


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Most shared memory of one block, in bytes (CUDA C++ Programming Guide, technical specifications per compute
    capability). An unknown one is taken for the smallest."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) * _KIB


A100 = Target((8, 0), 108, shared_bytes_of((8, 0)))
H100 = Target((9, 0), 132, shared_bytes_of((9, 0)))


@dataclass(frozen=True)
class Launch:
    """`kernel` over `grid` with positional `arguments` (tensors, integers, floats) and compile-time `constants`.

    Triton compiles a kernel anew for integers that are 1 or divide by 16 and for tensors that begin at multiples of 16
    bytes, which takes seconds: what changes from step to step is named in its `do_not_specialize`, or lies aligned.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> Any:
        """Launch, and return what Triton compiled; None in its interpreter. Inside `recording` nothing is launched."""
        record = _record.get()
        if record is not None:
            record(self)
            return None
        return self.kernel[self.grid](*self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What is passed to the kernel by name."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


_record: ContextVar[Callable[[Launch], object] | None] = ContextVar("where launches are recorded", default=None)


@contextmanager
def recording(record: Callable[[Launch], object]) -> Iterator[None]:
    """Pass this thread's launches to `record` instead of running them: what they would have written stays as it was.

    So the code that launches is itself the list of what there is to compile. A launch refers to its tensors: to keep
    those of many steps keeps their memory.
    """
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def cache_arguments(cache: LayerCache) -> tuple[torch.Tensor | None, ...]:
    """Keys, values and their scales as kernels take them: FP8 codes as bytes, None where there are no scales."""
    assert all(tensor.is_contiguous() for tensor in cache.tensors)
    stored = (s.view(torch.int8) if s.dtype == FP8 else s for s in (cache.k_CBKD, cache.v_CBKD))
    return *stored, cache.k_scale_CKB, cache.v_scale_CKB


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << (number - 1).bit_length())
