"""Compile all launches of a tiny model's engine for a simulated H100, on threads. Print as JSON the messages, the
numbers of kernels in Triton's cache on disk before and after, and the number that was missing there.

`python -m tests.kernels.triton.compile_ahead_process MODEL CACHE`, in a separate process: other tests interpret
kernels. A driver that only names its card replaces CUDA's; the model's tensors have no memory.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from pipeline.engine.config import EngineConfig
from pipeline.engine.startup import loaded
from pipeline.engine.startup.build import captured_shapes
from pipeline.engine.startup.resolve import Resolved, resolve
from pipeline.kernels.select import keep_gpu_kernels_in
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.launch import H100, CompileTarget
from pipeline.model.config import read_config

META = torch.device("meta")


def num_kernels(cache: Path) -> int:
    return len(list(cache.glob("*/*.cubin")))


def main(model: str, cache: str) -> None:
    config = EngineConfig(model, device="cpu", dtype="bfloat16", max_model_len=128, max_num_seqs=64, block_size=64,
                          max_num_batched_tokens=256)  # fmt: skip
    shape = read_config(Path(model))
    resolved: Resolved = replace(resolve(config, shape), device=META)
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(  # type: ignore[arg-type]
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment,method-assign]
    CompileTarget.from_device = classmethod(lambda cls, device: H100)  # type: ignore[assignment,method-assign]
    kernels = triton_kernels(torch.bfloat16, META)
    loaded.select_kernels = lambda *_: kernels  # type: ignore[assignment]
    loaded.dense_weights_fit = lambda *_: True  # type: ignore[assignment]
    loaded.gpu_share_bytes = lambda *_: 0  # type: ignore[assignment]
    keep_gpu_kernels_in(Path(cache))
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)  # type: ignore[assignment]
    before, messages = num_kernels(Path(cache)), list[str]()
    target_model: Any = loaded.LoadedModel.load(Path(model), shape, resolved)
    target_model.compile_kernels(resolved, captured_shapes(resolved, 0)[0], resolved.kv_pages, 2, messages.append)
    missed = hits.count(False)
    print(json.dumps({"messages": messages, "before": before, "after": num_kernels(Path(cache)), "missed": missed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
