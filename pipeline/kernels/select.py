"""Selection of the kernels for a device and a type. The only place that decides it."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from pipeline.errors import ConfigError, EnvironmentFailed
from pipeline.kernels.activations.act_quant import act_quant_oracles
from pipeline.kernels.activations.fp8 import MIN_CAPABILITY
from pipeline.kernels.contract import Kernels
from pipeline.kernels.reference import reference_kernels
from pipeline.machine.caches import write_problem
from pipeline.machine.numba import keep_compiled_in, numba_unavailable_reason

KERNELS = ("auto", "reference", "cpu", "triton")


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    wanted: str = "auto",
    keep_dense: bool = True,
    deterministic: bool = False,
) -> Kernels:
    """Return the set `wanted` of KERNELS for `device` and `dtype`; "auto" is the fastest one that supports them.

    `Kernels.backends` names the implementation of each kernel. keep_dense: see `triton.kernel_set.triton_kernels`.
    deterministic: a row's results are bit-identical whatever else is in a step (`triton/batch_invariant.py`,
    `cpu/invariant.py`). Raises ConfigError if the set is not installed, does not support the device, or is not
    deterministic as requested.
    """
    on_gpu = device.type != "cpu"
    if wanted == "auto":
        wanted = ("triton" if find_spec("triton") is not None or deterministic else "reference") if on_gpu else "cpu"
        if on_gpu and wanted == "reference":
            slow = reference_kernels(dtype, device)
            backends = "torch (reference): triton is not installed, this is slower"
            return replace(slow, backends=dict.fromkeys(slow.backends, backends))
    if wanted == "reference":
        if deterministic:
            raise ConfigError(
                "engine.deterministic: not with engine.kernels = 'reference', because torch's matrix products choose "
                "the order of their sums by the number of tokens; use auto"
            )
        return reference_kernels(dtype, device)
    if wanted == "cpu":
        if on_gpu:
            raise ConfigError(f"engine.kernels = 'cpu': these kernels do not run on {device}; use auto or triton")
        return _invariant_cpu_kernels(dtype) if deterministic else _cpu_kernels(dtype)
    if wanted == "triton":
        return _triton_kernels(device, dtype, keep_dense, deterministic)
    raise ConfigError(f"engine.kernels = {wanted!r}: expected one of {', '.join(KERNELS)}")


def native_activations(device: torch.device, kernels: str) -> frozenset[str]:
    """Return the types of rounded activations (`engine.activation_dtype`) that the kernels of a device multiply. The
    reference's measure quality only."""
    if kernels == "reference":
        return frozenset()
    if device.type == "cuda":
        has_fp8 = find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        return frozenset({"fp8"} if has_fp8 else ())
    if kernels == "triton":
        return frozenset({"fp8"})
    return frozenset({"int8"} if _multiplies_int8() else ())


def _multiplies_int8() -> bool:
    if numba_unavailable_reason() is not None:
        return False
    from pipeline.kernels.cpu.linear.linear_int8 import has_vnni

    return has_vnni()


def _triton_kernels(device: torch.device, dtype: torch.dtype, keep_dense: bool, deterministic: bool) -> Kernels:
    if find_spec("triton") is None:
        raise ConfigError("engine.kernels = 'triton': the package triton is not installed; pip install triton")
    from pipeline.kernels.triton.kernel_set import is_interpreted, triton_kernels
    from pipeline.kernels.triton.linear.dispatch import DequantBuffer

    if device.type == "cpu" and not is_interpreted():
        raise ConfigError(
            "engine.kernels = 'triton': these kernels are for NVIDIA GPUs. On a CPU only Triton's interpreter runs "
            "them, very slowly, with TRITON_INTERPRET=1 in the environment; use auto"
        )
    scratch = None if keep_dense else DequantBuffer(dtype, device)
    return triton_kernels(dtype, device, scratch=scratch, deterministic=deterministic)


def keep_cpu_kernels_in(folder: Path) -> None:
    """Keep compiled CPU kernels of this process in `folder`. Call it before any of their modules is imported.

    Raises EnvironmentFailed if the folder is not writable.
    """
    if numba_unavailable_reason() is not None:
        return
    reason = write_problem(folder)
    if not reason:  # numba writes into subfolders
        not_writable = (entry.name for entry in folder.iterdir() if not os.access(entry, os.W_OK | os.X_OK))
        reason = next((f"{name} in it is not writable" for name in not_writable), "")
    if reason:
        raise EnvironmentFailed(
            f"{folder}: cannot keep compiled CPU kernels there ({reason}); set PIPELINE_CACHE or NUMBA_CACHE_DIR "
            "to a writable folder"
        )
    keep_compiled_in(folder)


def keep_gpu_kernels_in(folder: Path) -> None:
    """Keep compiled GPU kernels of this process in `folder`.

    Raises EnvironmentFailed if the folder is not writable, or code cannot be loaded from it: Triton compiles its
    launchers to shared libraries.
    """
    if find_spec("triton") is None:
        return
    reason = write_problem(folder)
    if not reason and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        reason = "mounted with noexec"
    if reason:
        raise EnvironmentFailed(
            f"{folder}: cannot keep compiled GPU kernels there ({reason}); set PIPELINE_CACHE or TRITON_CACHE_DIR "
            "to a writable folder"
        )
    from pipeline.kernels.triton.compile_ahead import keep_kernels_in

    keep_kernels_in(folder)


def _cpu_kernels(dtype: torch.dtype) -> Kernels:
    kernels = reference_kernels(dtype, torch.device("cpu"))
    from pipeline.kernels.cpu.linear.selection import prepare_linear, supports_bf16

    if dtype == torch.bfloat16:
        linear = "oneDNN, packed" if supports_bf16() else "torch (BLAS)"
        linear += "; int4 weights: int4pack for few tokens"
    else:
        linear = "torch (BLAS)"
    rounded = act_quant_oracles(lambda weight: prepare_linear(weight, torch.float32), "the linears of float32")
    kernels = replace(kernels, prepare_linear=lambda weight: prepare_linear(weight, dtype), rounded=rounded)
    if (lacks := numba_unavailable_reason()) is not None:
        slow = dict.fromkeys(kernels.backends, f"torch (reference): numba {lacks}, this is slower")
        return replace(kernels, backends=slow | {"linear": linear})
    from pipeline.kernels.cpu.attention.attention import attention
    from pipeline.kernels.cpu.compile.threads import init_thread_pool
    from pipeline.kernels.cpu.delta_net import delta_net
    from pipeline.kernels.cpu.elementwise import add_rms_norm, gate_mul, norm_rope_write, rms_norm
    from pipeline.kernels.cpu.experts import prepare_experts
    from pipeline.kernels.cpu.layer_loop import fused_layer_loop
    from pipeline.kernels.cpu.linear.linear_bf16 import use_avx512_bf16
    from pipeline.kernels.cpu.linear.linear_int8 import int8_linears

    init_thread_pool()
    if _multiplies_int8():
        rounded["int8"] = int8_linears()
    if dtype == torch.float32:
        linear = "numba on bfloat16, 8-bit and int4 weights; torch (BLAS) on float32 weights"
    elif dtype == torch.bfloat16 and use_avx512_bf16():
        linear = "numba on bfloat16 and int4 weights, products of pairs (AVX-512 BF16)"
    return replace(
        kernels,
        add_rms_norm=add_rms_norm,
        norm_rope_write=norm_rope_write,
        attention=attention,
        delta_net=delta_net,
        rms_norm=rms_norm,
        gate_mul=gate_mul,
        prepare_experts=prepare_experts,
        fused_layer_loop=fused_layer_loop,
        backends={
            "linear": linear,
            "add_rms_norm": "numba, one pass",
            "norm_rope_write": "numba, one pass",
            "attention": "numba",
            "delta_net": "numba",
            "rms_norm": "numba, one pass",
            "gate_mul": "numba, one pass",
            "route": "torch (reference)",
            "experts": "one after the other, by the linears; numba",
            "greedy": "numpy",
            "sample": "numpy and torch",
        },
    )


def supports_int4_alone(dtype: torch.dtype) -> bool:
    """Return whether 4-bit weights on CPU serve any number of tokens without an additional dense form."""
    if numba_unavailable_reason() is not None:
        return False
    from pipeline.kernels.cpu.linear.linear_bf16 import use_avx512_bf16

    return dtype == torch.float32 or (dtype == torch.bfloat16 and use_avx512_bf16())


def _invariant_cpu_kernels(dtype: torch.dtype) -> Kernels:
    if dtype != torch.float32:
        raise ConfigError(
            f"engine.deterministic: on CPU in float32 only, and engine.dtype is {str(dtype).removeprefix('torch.')}: "
            "oneDNN chooses the order of its sums by the number of tokens; set engine.dtype: float32"
        )
    if (lacks := numba_unavailable_reason()) is not None:
        raise ConfigError(
            f"engine.deterministic: on CPU it needs numba, which {lacks}; pip install numba and a compatible numpy"
        )
    from pipeline.kernels.cpu.invariant import attention, prepare_linear

    kernels = _cpu_kernels(dtype)
    own = {
        "linear": "numba, whole tiles of tokens; batch-invariant",
        "attention": "numba, each query alone; batch-invariant",
    }
    return replace(
        kernels,
        prepare_linear=prepare_linear,
        attention=attention,
        fused_layer_loop=None,
        backends=kernels.backends | own,
    )


def default_dtype(device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """Return the dtype of `dtype: auto`: the checkpoint's on a GPU; on CPU bfloat16 if native, else float32."""
    if device.type == "cpu":
        from pipeline.kernels.cpu.linear.selection import supports_bf16

        return torch.bfloat16 if supports_bf16() and checkpoint != torch.float32 else torch.float32
    return checkpoint
