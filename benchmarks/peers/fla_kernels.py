"""Registers and instructions of flash-linear-attention's Gated DeltaNet kernels, compiled for sm_90 without a GPU.

    pip install --target F --no-deps fla-core==0.6.0 einops
    PYTHONPATH=F:. python -m benchmarks.peers.fla_kernels

Shapes are those of Qwen3.5-9B, in bfloat16 with states in float32, as in `benchmarks/compiled-kernels.md`, whose
columns these are. fla times the configurations of a kernel on the card and takes the fastest; a line shows the one with
the fewest instructions in its largest loop among those that spill least, and the registers of all.
"""

from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from pipeline.kernels.triton.launch import Launch
from tests.kernels.triton.compiling import TARGETS, Compiled, compile_for

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
OPTIONS = ("num_warps", "num_stages")
TARGET = TARGETS["sm_90"]

found: dict[str, list[Compiled]] = {}


def compile_instead(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Compile a kernel that would be launched."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments)) | named
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    names = [name for name in kernel.arg_names if name not in constants]
    assert kernel.arg_names[: len(names)] == names
    launch = Launch(kernel, (1,), tuple(values[name] for name in names), constants, **options)
    found.setdefault(kernel.__name__, []).append(compile_for(launch, TARGET))


def try_all(tuner: Autotuner, *arguments: Any, **named: Any) -> None:
    """Compile all configurations of a kernel."""
    for config in tuner.configs:
        tuner.fn.run(*arguments, **named, **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


def line(name: str, tried: list[Compiled]) -> str:
    best = min(tried, key=lambda each: (each.spill_bytes, len(each.loop())))
    loop, registers = best.loop(), [each.registers for each in tried]
    text = "\n".join(loop)
    cells = (
        name, len(tried), f"{min(registers)} to {max(registers)}", best.registers, best.spill_bytes, best.shared_bytes,
        best.num_warps, best.blocks(TARGET), len(loop), text.count("shfl."), text.count("bar.sync"),
        "wgmma" if "wgmma.mma_async" in best.ptx else "mma" if "mma.sync" in best.ptx else "",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    import fla.utils  # pyright: ignore[reportMissingImports]

    fla.utils.check_shared_mem = lambda *_, **__: True  # as on an H100, before its kernels are imported
    fla.utils.IS_NVIDIA_HOPPER = True
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    for rule, num_sequences, num_tokens in (
        (fused_recurrent_gated_delta_rule, 512, 1),
        (chunk_gated_delta_rule, 1, 4096),
    ):
        keys = num_sequences, num_tokens, KEY_HEADS, HEAD_DIM
        values = num_sequences, num_tokens, VALUE_HEADS, HEAD_DIM
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in (keys, keys, values))
        g, beta = torch.zeros(values[:3]), torch.zeros(values[:3], dtype=torch.bfloat16)
        state = torch.zeros(num_sequences, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
        runs = patch.object(JITFunction, "run", compile_instead), patch.object(Autotuner, "run", try_all)
        with torch.no_grad(), runs[0], runs[1]:
            rule(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    columns = (
        "kernel", "tried", "registers of all", "registers", "spilled", "shared", "warps", "blocks", "instructions",
        "shuffles", "barriers", "products",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name, tried in found.items():
        print(line(name, tried), flush=True)


if __name__ == "__main__":
    main()
