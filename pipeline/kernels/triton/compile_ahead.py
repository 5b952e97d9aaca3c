"""Compilation of kernels before they are needed, in parallel, with Triton's cache on disk across runs.

Triton compiles a kernel at its first launch with arguments of given types, for 0.1 s to several seconds, one after the
other. A job would encounter most of its kernels in its first minutes, on every fresh machine.
"""

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode

from pipeline.kernels.triton.launch import Launch, recording

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
}


def compile_ahead(steps: Callable[[], None], log: Callable[[str], None], num_threads: int) -> None:
    """Implement `contract.Kernels.compile_ahead`. Reports a kernel that fails to compile; steps that need it raise."""
    launches = DistinctLaunches()
    with recording(launches.add):
        steps()
    failed = compile_launches(
        launches.of_variant.values(),
        num_threads,
        lambda done, total: log(f"compiling GPU kernels, {done} of {total}"),
    )
    for kernel, error in failed.items():
        log(f"GPU kernel {kernel} failed to compile; steps that need it will fail: {error}")


class DistinctLaunches:
    """One launch of each variant, with its tensors replaced by small ones: those of an 8B model's step with 16,384
    tokens would exceed a card's memory."""

    def __init__(self) -> None:
        self.of_variant: dict[Hashable, Launch] = {}
        self._stand_ins: dict[Hashable, torch.Tensor] = {}

    def add(self, launch: Launch) -> None:
        key = variant(launch)
        if key not in self.of_variant:
            arguments = tuple(self._stand_in(each) for each in launch.arguments)
            self.of_variant[key] = replace(launch, arguments=arguments)

    def _stand_in(self, argument: Any) -> Any:
        """Return a small tensor of the same type, device and alignment to 16 bytes, which is all that Triton reads of a
        tensor to compile for it."""
        if not isinstance(argument, torch.Tensor):
            return argument
        key = argument.dtype, argument.device, _divides_by_16(argument)
        if key not in self._stand_ins:
            small = torch.empty(64, dtype=argument.dtype, device=argument.device)
            self._stand_ins[key] = small if _divides_by_16(argument) else small[1:]
        return self._stand_ins[key]


def compile_launches(
    launches: Iterable[Launch], num_threads: int, log: Callable[[int, int], None]
) -> dict[str, BaseException]:
    """Compile launches of distinct variants for the current device in parallel, unless Triton's cache has them.

    Threads suffice: most of the time is spent in LLVM and ptxas, where Triton releases the GIL. Calls say(compiled,
    all) after each one. Return the errors by kernel.
    """
    failed: dict[str, BaseException] = {}
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        names = {}
        for launch in launches:
            submitted = len(mode.raw_futures)
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            names |= dict.fromkeys(mode.raw_futures[submitted:], launch.kernel.__name__.lstrip("_"))
        for done, future in enumerate(as_completed(mode.raw_futures), start=1):
            log(done, len(mode.raw_futures))
            if (error := future.exception()) is not None:
                failed[names[future]] = error
    return failed


def keep_kernels_in(folder: Path) -> None:
    """Use `folder` as Triton's cache in this process. It can be copied to machines with the same kind of card and the
    same versions of Triton and of this package."""
    knobs.cache.dir = str(folder)


def variant(launch: Launch) -> Hashable:
    """Return what Triton compiles a launch for: launches of one variant share their code."""
    types = tuple(argument_types(launch).values())
    return launch.kernel.__name__, types, tuple(sorted(launch.options.items()))


def argument_types(launch: Launch) -> dict[str, tuple[str, bool]]:
    """Return the type of each positional argument as Triton reads it ("constexpr" if its value is compiled in), and
    whether it counts as a multiple of 16."""
    not_specialized = _not_specialized(launch.kernel)
    types = {}
    for name, argument in zip(launch.kernel.arg_names, launch.arguments):
        is_specialized = name not in not_specialized
        types[name] = _type_of(argument, is_specialized), is_specialized and _divides_by_16(argument)
    return types


def _not_specialized(kernel: Any) -> set[str]:
    """Return the names of the arguments that a kernel, compiled or interpreted, is not specialized for."""
    if hasattr(kernel, "params"):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs.get("do_not_specialize") or ())


def _type_of(argument: Any, is_specialized: bool) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + _TYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    if argument is None or (argument == 1 and is_specialized):
        return "constexpr"
    return "i32" if -(1 << 31) <= argument < 1 << 31 else "i64"


def _divides_by_16(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % 16 == 0
    return isinstance(argument, int) and argument % 16 == 0
