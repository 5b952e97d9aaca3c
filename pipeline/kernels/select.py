"""Which kernels serve a device and a type. The only place that decides it, and it says what it decided."""

from dataclasses import replace
from importlib.util import find_spec

import torch

from pipeline.kernels.contract import Kernels
from pipeline.kernels.reference import reference_kernels


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest set that serves `device` and `dtype`; `Kernels.served_by` names each one's origin."""
    kernels = reference_kernels(dtype, device)
    if device.type != "cpu":
        return kernels
    from pipeline.kernels.cpu.linear import prepare_linear, supports_bf16

    if dtype == torch.bfloat16:
        linear = "oneDNN, packed" if supports_bf16() else "torch (BLAS)"
        linear += "; int4 weights: int4pack for few tokens"
    else:
        linear = "torch (BLAS)"
    kernels = replace(kernels, prepare_linear=lambda weight: prepare_linear(weight, dtype))
    if find_spec("numba") is None:
        slow = dict.fromkeys(kernels.served_by, "torch (reference): numba is not installed, this is slower")
        return replace(kernels, served_by=slow | {"linear": linear})
    from pipeline.kernels.cpu.attention import attention
    from pipeline.kernels.cpu.compiled import own_threads
    from pipeline.kernels.cpu.fused import add_rms_norm, norm_rope_write, silu_mul

    own_threads()
    if dtype == torch.float32:
        linear = "numba on bfloat16, 8-bit and int4 weights; torch (BLAS) on float32 weights"
    return replace(
        kernels,
        add_rms_norm=add_rms_norm,
        norm_rope_write=norm_rope_write,
        attention=attention,
        silu_mul=silu_mul,
        served_by={
            "linear": linear,
            "add_rms_norm": "numba, one pass",
            "norm_rope_write": "numba, one pass",
            "attention": "numba",
            "silu_mul": "numba, one pass",
        },
    )


def must_compile(device: torch.device) -> bool:
    """Whether kernels are compiled before the first step, which takes some seconds, once on a machine."""
    if device.type != "cpu" or find_spec("numba") is None:
        return False
    from pipeline.kernels.cpu import compiled, compiled_linear

    elementwise = (compiled.add_rms_norm, compiled.norm_rope_write, compiled.silu_mul)
    others = (compiled.paged_decode, compiled.paged_prefill, compiled_linear.multiply_bfloat16)
    return not all(compiled.is_cached(kernel) for kernel in (*elementwise, *others))


def default_dtype(device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """`dtype: auto`: the checkpoint's type on a GPU; on CPU bfloat16 where it is native, else float32."""
    if device.type == "cpu":
        from pipeline.kernels.cpu.linear import supports_bf16

        return torch.bfloat16 if supports_bf16() and checkpoint != torch.float32 else torch.float32
    return checkpoint
