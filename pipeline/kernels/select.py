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

    linear = "oneDNN, packed" if dtype == torch.bfloat16 and supports_bf16() else "torch (BLAS)"
    if dtype == torch.bfloat16:
        linear += "; int4 weights: int4pack for few tokens"
    attention, served_attention = kernels.attention, "torch (reference): numba is not installed, decoding is slower"
    if find_spec("numba") is not None:
        from pipeline.kernels.cpu.attention import attention

        served_attention = "numba for single queries, torch for longer ones"
    return replace(
        kernels,
        prepare_linear=lambda weight: prepare_linear(weight, dtype),
        attention=attention,
        served_by=kernels.served_by | {"linear": linear, "attention": served_attention},
    )


def default_dtype(device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """`dtype: auto`: the checkpoint's type on a GPU; on CPU bfloat16 where it is native, else float32."""
    if device.type == "cpu":
        from pipeline.kernels.cpu.linear import supports_bf16

        return torch.bfloat16 if supports_bf16() and checkpoint != torch.float32 else torch.float32
    return checkpoint
