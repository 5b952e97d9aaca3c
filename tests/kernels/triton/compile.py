"""Compiles a launch for a GPU that need not be present, and tells what came of it: registers, spills, shared memory.

Types and alignments are read from the launch's arguments as Triton reads them when it runs, so that the code is the
same; the tensors may lie on the `meta` device.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.errors import EnvironmentFailed
from pipeline.kernels.triton.launch import Launch, Target

MAX_REGISTERS = 255  # of a thread

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
_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)[.:\w]*")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """registers: of a thread. spill_bytes: of a thread's stack and local memory, 0 where nothing was spilled.
    shared_bytes: of a block."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str
    cubin: bytes

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def multiplies_e4m3(self) -> bool:
        """Both operands, with sums in float32."""
        return re.search(r"mma[\w.]*\.f32\.e4m3\.e4m3", self.ptx) is not None

    @property
    def products(self) -> list[str]:
        """The instructions that multiply tiles, by their full names, which say their shape."""
        return sorted(set(_PRODUCT.findall(self.ptx)))

    def problems(self, target: Target) -> list[str]:
        """Why this cannot run well on `target`; empty where it can."""
        found = []
        if self.spill_bytes:
            found.append(f"{self.spill_bytes} bytes of registers spilled")
        if self.shared_bytes > target.max_shared_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, {target.max_shared_bytes} at most")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers, {MAX_REGISTERS} at most")
        return found


def compile_for(launch: Launch, target: Target) -> Compiled:
    """Compile for `target`'s capability; takes seconds, or none where Triton's cache on disk has it.

    Raises EnvironmentFailed where the cubin cannot be examined, or where kernels are interpreted (TRITON_INTERPRET).
    """
    kernel = launch.kernel
    if not isinstance(kernel, triton.JITFunction):
        raise EnvironmentFailed(
            f"kernel {kernel.__name__} is interpreted, so nothing can be compiled: unset TRITON_INTERPRET"
        )
    major, minor = target.capability
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(_source(launch), target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    cubin = compiled.asm["cubin"]
    registers, spill_bytes = _usage(cubin)
    return Compiled(registers, spill_bytes, compiled.metadata.shared, compiled.asm["ptx"], cubin)


def _source(launch: Launch) -> ASTSource:
    names = launch.kernel.arg_names
    fixed = [not parameter.do_not_specialize for parameter in launch.kernel.params]
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes = {}
    for index, (name, argument) in enumerate(zip(names, launch.arguments)):
        signature[name] = _type_of(argument, fixed[index])
        if signature[name] == "constexpr":
            constants[name] = argument
        elif fixed[index] and _divides_by_16(argument):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    missing = [name for name in names if name not in signature]
    assert not missing, f"{launch.kernel.__name__}: no value for {missing}"
    return ASTSource(launch.kernel, {name: signature[name] for name in names}, constants, attributes)


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


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread, as `cuobjdump` tells them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise EnvironmentFailed(f"{tool}: cannot tell what a kernel uses ({error}); reinstall triton") from None
    usage = _USAGE.search(told.stdout)
    if usage is None:
        raise EnvironmentFailed(f"{tool}: expected registers and local memory, got {told.stdout!r:.200}")
    registers, stack, local = (int(number) for number in usage.groups())
    return registers, stack + local
