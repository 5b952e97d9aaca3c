"""Compiles kernels before they are needed, several at once, and finds those of earlier runs in Triton's cache on disk.

Triton compiles a kernel when it is first launched with arguments of some types, for 0.1 to some seconds, one after the
other. A job would meet most of its kernels in the first minutes, each time on a fresh machine.
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


def compile_ahead(steps: Callable[[], None], say: Callable[[str], None], num_threads: int) -> None:
    """See `contract.Kernels`. A kernel that does not compile is told, and raises where a step needs it."""
    launches = DistinctLaunches()
    with recording(launches.add):
        steps()
    failed = compile_launches(
        launches.of_variant.values(),
        num_threads,
        lambda done, total: say(f"compiling GPU kernels, {done} of {total}"),
    )
    for kernel, error in failed.items():
        say(f"the GPU kernel {kernel} did not compile; steps that need it will fail: {error}")


class DistinctLaunches:
    """One launch of each variant, whose tensors are replaced by small ones: those of a step of an 8B model with 16,384
    tokens would take more memory than a card has."""

    def __init__(self) -> None:
        self.of_variant: dict[Hashable, Launch] = {}
        self._stand_ins: dict[Hashable, torch.Tensor] = {}

    def add(self, launch: Launch) -> None:
        key = variant(launch)
        if key not in self.of_variant:
            arguments = tuple(self._stand_in(each) for each in launch.arguments)
            self.of_variant[key] = replace(launch, arguments=arguments)

    def _stand_in(self, argument: Any) -> Any:
        """A tensor of the same type and device, aligned to 16 bytes where the argument is: all that Triton reads of a
        tensor to compile for it."""
        if not isinstance(argument, torch.Tensor):
            return argument
        key = argument.dtype, argument.device, _divides_by_16(argument)
        if key not in self._stand_ins:
            small = torch.empty(64, dtype=argument.dtype, device=argument.device)
            self._stand_ins[key] = small if _divides_by_16(argument) else small[1:]
        return self._stand_ins[key]


def compile_launches(
    launches: Iterable[Launch], num_threads: int, say: Callable[[int, int], None]
) -> dict[str, BaseException]:
    """Compile launches of distinct variants for the current device, on threads, where Triton's cache lacks them: for
    most of the time, in LLVM and ptxas, Triton lets other threads run. Calls say(compiled, all) at each. Returns what
    failed, by kernel."""
    failed: dict[str, BaseException] = {}
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        names = {}
        for launch in launches:
            submitted = len(mode.raw_futures)
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            names |= dict.fromkeys(mode.raw_futures[submitted:], launch.kernel.__name__.lstrip("_"))
        for done, future in enumerate(as_completed(mode.raw_futures), start=1):
            say(done, len(mode.raw_futures))
            if (error := future.exception()) is not None:
                failed[names[future]] = error
    return failed


def keep_kernels_in(folder: Path) -> None:
    """From now on this process has Triton's cache there. The folder can be copied to machines with the same kind of
    card and the same versions of Triton and of this program."""
    knobs.cache.dir = str(folder)


def variant(launch: Launch) -> Hashable:
    """What of a launch Triton compiles for: launches of one variant share their code."""
    types = tuple(argument_types(launch).values())
    return launch.kernel.__name__, types, tuple(sorted(launch.options.items()))


def argument_types(launch: Launch) -> dict[str, tuple[str, bool]]:
    """By name, the type of each positional argument as Triton reads it ("constexpr" where its value is compiled in),
    and whether it is taken for a multiple of 16."""
    varying = _not_specialized(launch.kernel)
    found = {}
    for name, argument in zip(launch.kernel.arg_names, launch.arguments):
        is_fixed = name not in varying
        found[name] = _type_of(argument, is_fixed), is_fixed and _divides_by_16(argument)
    return found


def _not_specialized(kernel: Any) -> set[str]:
    """Also of an interpreted kernel."""
    if hasattr(kernel, "params"):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs.get("do_not_specialize") or ())


def _type_of(argument: Any, is_fixed: bool) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + _TYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    if argument is None or (argument == 1 and is_fixed):
        return "constexpr"
    return "i32" if -(1 << 31) <= argument < 1 << 31 else "i64"


def _divides_by_16(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % 16 == 0
    return isinstance(argument, int) and argument % 16 == 0
