"""Compile kernels for absent GPUs and print a line of JSON for each: registers, spills, shared memory, instructions.

`python -m tests.kernels.triton.compiling sm_80|sm_89|sm_90|sm_100`, in a separate process: other tests interpret
kernels, which is decided when triton is imported. `python -m tools.compiled_kernels` writes a page of the results.
Types and alignments are read from a launch's arguments as Triton reads them at run time, so that the code is the same;
the tensors may be on the `meta` device.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels.delta_shape import DeltaNet
from pipeline.kernels.triton.compile_ahead import argument_types
from pipeline.kernels.triton.launch import A100, H100, CompileTarget, Launch, shared_bytes_of
from tests.kernels.triton.expert_launches import FORMS, GPT_OSS_20B, QWEN3_30B, expert_launches, lora_launches
from tests.kernels.triton.model_launches import ModelShape, delta_net_launches_of, fp8_launches_of, launches_of

MAX_REGISTERS = 255  # of a thread

_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[.:\w]*")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_LABEL, _BRANCH = re.compile(r"^(\$L\w+):"), re.compile(r"\bbra\S*\s+(\$L\w+)")
_LOOP = re.compile(r"scf\.for .*?(?:-> \((.*?)\) +: \w+ \{|\{)")
_MULTIPROCESSOR = {8: (164, 64), 9: (228, 64), 10: (228, 64)}  # KiB of shared memory, warps; by major capability
_SMALL_MULTIPROCESSOR = 100, 48
_RESERVED_BYTES = 1024  # of shared memory for each block


@dataclass(frozen=True)
class Compiled:
    """Figures of a compiled kernel.

    registers: of a thread. spill_bytes: of a thread's stack and local memory. shared_bytes: of a block.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    drops_counters: bool  # a loop of Triton's own form carried more integers: Triton 3.6 took some for constants
    sum_layouts: list[str]  # of tensors that are summed to one float32
    ptx: str

    @property
    def sums(self) -> list[str]:
        """Return the order in which values are summed to one float32: those of a thread, and its operations before
        threads exchange theirs."""
        operations = re.findall(r"\b(?:fma|mul|add)\.(?:rn\.)?f32", self.ptx.split("shfl.")[0])
        return [*self.sum_layouts, *sorted(operations)] if self.sum_layouts else []

    def loop(self) -> list[str]:
        """Return the instructions of the largest loop, inner loops once; empty if there is none."""
        found: list[str] = []
        lines: list[str] = []
        begins: dict[str, int] = {}
        for line in map(str.strip, self.ptx.splitlines()):
            if label := _LABEL.match(line):
                begins[label[1]] = len(lines)
            elif line.endswith(";") and not line.startswith("."):
                lines.append(line)
                branch = _BRANCH.search(line)
                if branch and branch[1] in begins and len(lines) - begins[branch[1]] > len(found):
                    found = lines[begins[branch[1]] :]
        return found

    def blocks(self, target: CompileTarget) -> int:
        """Return the blocks that fit a multiprocessor at once (CUDA C++ Programming Guide, compute capabilities)."""
        shared, warps = _MULTIPROCESSOR.get(target.capability[0], _SMALL_MULTIPROCESSOR)
        if target.capability in ((8, 6), (8, 9)):
            shared, warps = _SMALL_MULTIPROCESSOR
        of_warp = -(-self.registers * 32 // 256) * 256
        of_shared = shared * 1024 // (self.shared_bytes + _RESERVED_BYTES)
        return min(65536 // of_warp // self.num_warps, warps // self.num_warps, of_shared, 32)

    def problems(self, target: CompileTarget) -> list[str]:
        """Return reasons why this cannot run well on `target`, or an empty list."""
        found = []
        if self.drops_counters:
            found.append("a counter that a loop carries was taken for a constant")
        if self.spill_bytes:
            found.append(f"{self.spill_bytes} bytes of registers spilled")
        if self.shared_bytes > target.max_shared_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, {target.max_shared_bytes} at most")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers, {MAX_REGISTERS} at most")
        return found


def compile_for(launch: Launch, target: CompileTarget) -> Compiled:
    """Compile for `target`'s capability; takes seconds unless Triton's cache on disk has it."""
    assert isinstance(launch.kernel, triton.JITFunction), "interpreted kernels are not compiled: unset TRITON_INTERPRET"
    major, minor = target.capability
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(_source(launch), target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    registers, spill_bytes = _usage(compiled.asm["cubin"])
    before, after = (_carried_integers(compiled.asm[form]) for form in ("ttir", "ttgir"))
    drops = len(before) == len(after) and any(kept < carried for carried, kept in zip(before, after))
    shared_bytes = compiled.metadata.shared
    layouts = _sum_layouts(compiled.asm["ttgir"])
    return Compiled(registers, spill_bytes, shared_bytes, launch.num_warps, drops, layouts, compiled.asm["ptx"])


def _carried_integers(form: str) -> list[int]:
    """Return for each loop the number of integers that one iteration passes to the next."""
    types = (re.sub(r"<[^<>]*>", "", match[1] or "") for match in _LOOP.finditer(form))
    return [len(re.findall(r"\bi(?:1|32|64)\b", each)) for each in types]


def _sum_layouts(form: str) -> list[str]:
    layouts = dict(re.findall(r"^#(\w+) = (#ttg\.\w+<.*>)$", form, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"\}\) : \(tensor<\w+xf32, #(\w+)>\) -> f32", form)]


def _source(launch: Launch) -> ASTSource:
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes = {}
    for index, (name, (kind, divides)) in enumerate(argument_types(launch).items()):
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = launch.arguments[index]
        elif divides:
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    missing = [name for name in names if name not in signature]
    assert not missing, f"{launch.kernel.__name__}: no value for {missing}"
    return ASTSource(launch.kernel, {name: signature[name] for name in names}, constants, attributes)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return a thread's registers and its bytes of stack and local memory, as `cuobjdump` shows them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    usage = _USAGE.search(shown.stdout)
    assert usage is not None, shown.stdout
    registers, stack, local = (int(number) for number in usage.groups())
    return registers, stack + local


FIXED = "fixed product, few tokens", "fixed product, many tokens", "fixed product, one part"
CASCADE = "cascade", "decode behind a cascade, 1 queries", "decode behind a cascade, 8 queries"
SOFTMAX = "decode, 1 queries", "decode, 1 queries, join", *CASCADE[:2], "prefill"
LARGE = "norm_rope_write", "decode, 4 queries", "decode, 4 queries, join", "decode behind a cascade, 4 queries"
TARGETS = {
    "sm_80": A100,
    "sm_89": CompileTarget((8, 9), 58, shared_bytes_of((8, 9))),
    "sm_90": H100,
    "sm_100": CompileTarget((10, 0), 148, shared_bytes_of((10, 0))),
}
LLAMA_8B = ModelShape(4096, 14336, 32, 8, 128, 128256)
GROUPS_OF_5 = ModelShape(5120, 13824, 40, 8, 128, 152064)  # not a power of two: more registers
GEMMA4_26B = ModelShape(2816, 2112, 16, 2, 512, 262144)  # layers of full attention
GEMMA4_26B_WINDOWED = ModelShape(2816, 2112, 16, 8, 256, 262144)
QWEN3_5_9B = DeltaNet(16, 32, 128, 128, 4)
QWEN3_SMALL = ModelShape(1024, 3072, 16, 8, 128, 151936, qk_norm=True)


def experts(target: CompileTarget) -> dict[str, Launch]:
    """Return the launches of expert layers, with the narrowest tiles and the widest."""
    found = {}
    for form in FORMS:
        shape, model = (GPT_OSS_20B, "gpt-oss-20b") if form == "mxfp4" else (QWEN3_30B, "Qwen3-30B-A3B")
        for num_tokens in (1, 64, 4096):
            launches = expert_launches(shape, form, num_tokens, target)
            found |= {f"experts, {name}, {model}": launches[name] for name in ("route", "assign", "combine")
                      if name in launches}  # fmt: skip
            found[f"experts, {form}, {num_tokens} tokens, {model}"] = launches["gate_up"]
    return found


def adapters(target: CompileTarget) -> dict[str, Launch]:
    """Return the launches of four adapters of rank 16 of gate and up, with the narrowest tiles and the widest."""
    sizes = 2 * LLAMA_8B.intermediate_size, LLAMA_8B.hidden_size
    found = {}
    for num_tokens in (1, 32, 4096):
        by_a, by_b = lora_launches(4, 16, *sizes, num_tokens, target)
        found |= {f"adapters, A, {num_tokens} tokens": by_a, f"adapters, B, {num_tokens} tokens": by_b}
    return found


def with_constants(launch: Launch, **constants: int) -> Launch:
    return replace(launch, constants={**launch.constants, **constants})


def chosen(name: str) -> dict[str, Launch]:
    """Return all kernels for each target, those with products for more shapes on sm_80 and sm_90; and controls that
    must have problems."""
    target = TARGETS[name]
    all_of = launches_of(LLAMA_8B, torch.bfloat16, target)
    windowed = launches_of(LLAMA_8B, torch.bfloat16, target, window=4096)
    over_fp8 = {
        f"{key}, fp8 cache{suffix}": launch
        for suffix, shape, dtype, span in (
            ("", LLAMA_8B, torch.bfloat16, None),
            (", windowed", LLAMA_8B, torch.bfloat16, 4096),
            (", groups of 5", GROUPS_OF_5, torch.float16, None),
        )
        for key, launch in launches_of(shape, dtype, target, span, with_fp8_cache=True).items()
        if key in ("norm_rope_write", "convert", "decode, 1 queries", "prefill", *CASCADE[:2])
    }
    delta_nets = delta_net_launches_of(QWEN3_5_9B, torch.bfloat16)
    narrow = delta_net_launches_of(replace(QWEN3_5_9B, state_dtype="bfloat16"), torch.bfloat16)["delta_net"]
    all_of |= over_fp8 | experts(target) | adapters(target)
    all_of |= {f"{key}, Qwen3.5-9B": launch for key, launch in delta_nets.items()}
    all_of["delta_net, bfloat16 states, Qwen3.5-9B"] = narrow
    for suffix, with_fp8 in (("", False), (", fp8 cache", True)):
        capped = launches_of(LLAMA_8B, torch.bfloat16, target, with_fp8_cache=with_fp8, softcap=50.0, with_sinks=True)
        all_of |= {f"{key}{suffix}, softcap and sinks": capped[key] for key in SOFTMAX}
    large = launches_of(GEMMA4_26B, torch.bfloat16, target)
    all_of |= {f"{key}, heads of 512": large[key] for key in (*SOFTMAX, *LARGE)}
    windowed_256 = launches_of(GEMMA4_26B_WINDOWED, torch.bfloat16, target, window=1024)["prefill"]
    all_of["prefill, heads of 256, windowed"] = windowed_256
    for group_size in (32, 64):
        grouped = launches_of(replace(LLAMA_8B, group_size=group_size), torch.bfloat16, target)
        all_of |= {f"{key}, groups of {group_size}": grouped[key] for key in ("int4, 1 tokens", "int4, 64 tokens")}
    if name in ("sm_89", "sm_100"):
        return all_of
    by_5 = launches_of(GROUPS_OF_5, torch.float16, target)
    if name == "sm_80":
        wanting = with_constants(replace(windowed["prefill"], num_warps=4), KEYS=64)
        by_5 = {key: by_5[key] for key in by_5 if key.startswith("decode") or key in ("prefill", "cascade")}
        all_of |= {"prefill, windowed": windowed["prefill"], "control: too many keys for the registers": wanting}
    else:
        wanting = with_constants(all_of["prefill"], STAGES=7)
        by_5 = {key: by_5[key] for key in by_5 if key.startswith(("decode", "cascade"))}
        by_5_windowed = launches_of(GROUPS_OF_5, torch.float16, target, window=4096)["prefill"]
        by_32 = fp8_launches_of(replace(LLAMA_8B, group_size=32), torch.bfloat16, target)["fp8, 512 tokens"]
        normed = launches_of(QWEN3_SMALL, torch.float16, target)["norm_rope_write"]
        all_of |= {"prefill, groups of 5, windowed": by_5_windowed, "fp8, groups of 32": by_32}
        all_of |= {"norm_rope_write, normed": normed, "control: too many stages for the memory": wanting}
    return all_of | {f"{key}, groups of 5": launch for key, launch in by_5.items()}


def main(name: str, *sample: str) -> None:
    """Compile the kernels of a target with these names, or all, and print a line of JSON for each."""
    target, launches = TARGETS[name], chosen(name)
    for key, launch in ((key, launches[key]) for key in sample or launches):
        compiled = compile_for(launch, target)
        loop = compiled.loop()
        text = "\n".join(loop)
        line = {
            "name": key, "problems": compiled.problems(target), "sums": compiled.sums,
            # Both operands in e4m3, with sums in float32; products by their full names, which give the shapes of tiles.
            "uses_wgmma": "wgmma.mma_async" in compiled.ptx,
            "multiplies_e4m3": re.search(r"mma[\w.]*\.f32\.e4m3\.e4m3", compiled.ptx) is not None,
            "products": sorted(set(_PRODUCT.findall(compiled.ptx))),
            "registers": compiled.registers, "spill_bytes": compiled.spill_bytes, "warps": launch.num_warps,
            "shared_bytes": compiled.shared_bytes, "blocks": compiled.blocks(target), "instructions": len(loop),
            "shuffles": text.count("shfl."), "barriers": text.count("bar.sync"),
            "waits": text.count("wgmma.wait_group"),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
