"""The elementwise work of a layer on CPU: three passes, each compiled by numba. See `contract.Kernels`."""

import numpy as np
import torch

from pipeline.kernels.cpu import compiled
from pipeline.kernels.cpu.compiled import bits, use_threads


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: `x_TH` becomes the norm and `residual_TH` the sum."""
    use_threads(x_TH.numel() >= compiled.PARALLEL_ELEMENTS)
    compiled.add_rms_norm(bits(x_TH), bits(residual_TH), bits(weight_H), np.float32(eps))
    return x_TH, residual_TH


def norm_rope_write(
    qkv_TMD: torch.Tensor,
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache_CBKD: torch.Tensor,
    v_cache_CBKD: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> torch.Tensor:
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    q_TND = qkv_TMD.new_empty(num_tokens, num_all_heads - 2 * k_cache_CBKD.shape[2], head_dim)
    q_norm_D, k_norm_D = qk_norm_D or (qkv_TMD.new_ones(head_dim),) * 2
    use_threads(qkv_TMD.numel() >= compiled.PARALLEL_ELEMENTS)
    compiled.norm_rope_write(
        bits(qkv_TMD),
        cos_TD2.numpy(),
        sin_TD2.numpy(),
        qk_norm_D is not None,
        bits(q_norm_D),
        bits(k_norm_D),
        np.float32(eps),
        slot_mapping_T.numpy(),
        bits(k_cache_CBKD),
        bits(v_cache_CBKD),
        bits(q_TND),
    )
    return q_TND


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    out_TF = gate_up_T2F.new_empty(gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2)
    use_threads(out_TF.numel() >= compiled.PARALLEL_ELEMENTS)
    compiled.silu_mul(bits(gate_up_T2F), bits(out_TF))
    return out_TF
