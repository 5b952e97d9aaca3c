"""Compiles kernels for GPUs that are not there and prints what came of each as a line of JSON.

`python -m tests.kernels.triton.compiling sm_80|sm_89|sm_90`, in a process of its own: elsewhere in the tests kernels
are interpreted, which is settled when triton is imported.
"""

import json
import sys
from dataclasses import replace

import torch

from pipeline.kernels.triton.launch import A100, H100, Launch, Target, shared_bytes_of
from tests.kernels.triton.compile import compile_for
from tests.kernels.triton.model_launches import ModelShape, fp8_launches_of, launches_of

FIXED = "fixed product, few tokens", "fixed product, many tokens", "fixed product, one part"
CASCADE = "cascade", "decode behind a cascade, 1 queries", "decode behind a cascade, 8 queries"
TARGETS = {"sm_80": A100, "sm_89": Target((8, 9), 58, shared_bytes_of((8, 9))), "sm_90": H100}
LLAMA_8B = ModelShape(4096, 14336, 32, 8, 128, 128256)
GROUPS_OF_5 = ModelShape(5120, 13824, 40, 8, 128, 152064)  # not a power of two: more registers
QWEN3_SMALL = ModelShape(1024, 3072, 16, 8, 128, 151936, qk_norm=True)


def with_constants(launch: Launch, **constants: int) -> Launch:
    return replace(launch, constants={**launch.constants, **constants})


def chosen(name: str) -> dict[str, Launch]:
    """All kernels for sm_90, those with products and the widest rows for sm_80, the fp8 ones for sm_89; and some that
    must be found wanting."""
    target = TARGETS[name]
    if name == "sm_89":
        return fp8_launches_of(LLAMA_8B, torch.bfloat16, target)
    all_of = launches_of(LLAMA_8B, torch.bfloat16, target)
    windowed = launches_of(LLAMA_8B, torch.bfloat16, target, window=4096)
    over_fp8 = {
        f"{key}, fp8 cache{about}": launch
        for about, shape, dtype, span in (
            ("", LLAMA_8B, torch.bfloat16, None),
            (", windowed", LLAMA_8B, torch.bfloat16, 4096),
            (", groups of 5", GROUPS_OF_5, torch.float16, None),
        )
        for key, launch in launches_of(shape, dtype, target, span, with_fp8_cache=True).items()
        if key in ("norm_rope_write", "decode, 1 queries", "prefill", *CASCADE[:2])
    }
    all_of |= over_fp8
    if name == "sm_80":
        kept = *CASCADE, "decode, 1 queries", "prefill", "int4, 1 tokens", "int4, 64 tokens", "draw", *FIXED, *over_fp8
        wanting = with_constants(replace(windowed["prefill"], num_warps=4), KEYS=64)
        grouped = launches_of(GROUPS_OF_5, torch.float16, target)
        several = {f"{key}, groups of 5": grouped[key] for key in grouped if key.startswith("decode")}
        return (
            {key: all_of[key] for key in kept}
            | several
            | {
                "prefill, windowed": windowed["prefill"],
                "prefill, groups of 5": grouped["prefill"],
                "cascade, groups of 5": grouped["cascade"],
                "control: too many keys for the registers": wanting,
            }
        )
    normed = launches_of(QWEN3_SMALL, torch.float16, target)["norm_rope_write"]
    wanting = with_constants(all_of["prefill"], STAGES=7)
    grouped = launches_of(GROUPS_OF_5, torch.float16, target, window=4096)["prefill"]
    all_of["prefill, groups of 5, windowed"] = grouped
    several = launches_of(GROUPS_OF_5, torch.float16, target)
    all_of |= {f"{key}, groups of 5": several[key] for key in several if key.startswith(("decode", "cascade"))}
    all_of["fp8, groups of 32"] = fp8_launches_of(replace(LLAMA_8B, group_size=32), torch.bfloat16, target)[
        "fp8, 512 tokens"
    ]
    return all_of | {"norm_rope_write, normed": normed, "control: too many stages for the memory": wanting}


def main(name: str) -> None:
    target = TARGETS[name]
    for key, launch in chosen(name).items():
        compiled = compile_for(launch, target)
        told = {"name": key, "problems": compiled.problems(target), "uses_wgmma": compiled.uses_wgmma}
        told |= {"multiplies_e4m3": compiled.multiplies_e4m3, "products": compiled.products}
        print(json.dumps(told | {"registers": compiled.registers, "shared_bytes": compiled.shared_bytes}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
