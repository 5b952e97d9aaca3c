"""The set of Triton kernels. Implements `contract.Kernels`."""

from dataclasses import replace

import torch
from triton import knobs

from pipeline.kernels.contract import Kernels
from pipeline.kernels.triton import batch_invariant
from pipeline.kernels.triton.attention.captured_attention import CapturedAttention
from pipeline.kernels.triton.attention.dispatch import PagedAttention
from pipeline.kernels.triton.compile_ahead import compile_ahead
from pipeline.kernels.triton.delta_net import delta_net
from pipeline.kernels.triton.elementwise import add_rms_norm, gate_mul, norm_rope_write, rms_norm
from pipeline.kernels.triton.experts.layer import prepare_experts
from pipeline.kernels.triton.experts.route import route
from pipeline.kernels.triton.linear.dispatch import DequantBuffer, prepare_linear
from pipeline.kernels.triton.linear.fp8 import fp8_linears
from pipeline.kernels.triton.lora import GroupedLora
from pipeline.kernels.triton.sampling.argmax import greedy
from pipeline.kernels.triton.sampling.sample import sample


def triton_kernels(
    dtype: torch.dtype, device: torch.device, *, scratch: DequantBuffer | None = None, deterministic: bool = False
) -> Kernels:
    """Return the kernels for an NVIDIA GPU, or for a CPU with Triton's interpreter (TRITON_INTERPRET=1, for tests).

    scratch: workspace in which 4-bit weights are dequantized for steps of many tokens; without it each linear keeps a
    16-bit copy. deterministic: a row's results do not depend on the rest of the step; see `batch_invariant.py`.
    """
    widened = "16-bit weights kept" if scratch is None else "16-bit weights in a shared scratch"
    kernels = Kernels(
        prepare_linear=lambda weight: prepare_linear(weight, dtype, device, scratch),
        add_rms_norm=add_rms_norm,
        norm_rope_write=norm_rope_write,
        attention=PagedAttention(device),
        delta_net=delta_net,
        rms_norm=rms_norm,
        gate_mul=gate_mul,
        route=route,
        greedy=greedy,
        sample=sample,
        prepare_lora=lambda updates: GroupedLora(updates, dtype, device),
        backends={
            "linear": f"cuBLAS; int4 weights: Triton for few tokens, cuBLAS for many ({widened})",
            "add_rms_norm": "Triton, one launch",
            "norm_rope_write": "Triton, one launch",
            "attention": "Triton: paged, split over the GPU for few tokens per sequence, tiles of 128 rows for many",
            "delta_net": "Triton, two launches",
            "rms_norm": "Triton, one launch",
            "gate_mul": "Triton, one launch",
            "route": "Triton, one launch; groups of experts: torch",
            "experts": "Triton, one launch for the same linear of all experts; unsupported weights: one by one",
            "greedy": "Triton, two launches",
            "sample": "Triton, two launches",
        },
        prepare_experts=lambda weights, gate, _: prepare_experts(weights, gate, dtype, device, deterministic),
        graph_attention=CapturedAttention,
        rounded=fp8_linears(device, dtype, deterministic),
        compile_ahead=compile_ahead,
    )
    if not deterministic:
        return kernels
    deterministic_kernels = {
        "linear": f"Triton: one tile and one order of sums; batch-invariant ({widened})",
        "attention": "Triton: paged, tiles of 128 rows, not split; batch-invariant",
        "experts": "Triton: one tile for any number of tokens; batch-invariant; unsupported weights: one by one",
    }
    return replace(
        kernels,
        prepare_linear=lambda weight: batch_invariant.prepare_linear(weight, dtype, device, scratch),
        attention=batch_invariant.BatchInvariantAttention(device),
        graph_attention=batch_invariant.CapturedBatchInvariantAttention,
        backends=kernels.backends | deterministic_kernels,
    )


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set when Triton was first imported."""
    return bool(knobs.runtime.interpret)
