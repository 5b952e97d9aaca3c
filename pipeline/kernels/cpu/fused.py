"""The elementwise work of a layer on CPU: three passes, each compiled by numba. See `contract.Kernels`."""

import numpy as np
import torch

from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.cpu import elementwise
from pipeline.kernels.cpu.numerics import arrays_of, bits
from pipeline.kernels.cpu.threads import PARALLEL_ELEMENTS, WHOLE, use_threads


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: `x_TH` becomes the norm and `residual_TH` the sum."""
    use_threads(x_TH.numel() >= PARALLEL_ELEMENTS)
    elementwise.add_rms_norm(bits(x_TH), bits(residual_TH), bits(weight_H), np.float32(eps), *WHOLE)
    return x_TH, residual_TH


def norm_rope_write(
    qkv_TMD: torch.Tensor,
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: LayerCache,
    slot_mapping_T: torch.Tensor,
) -> torch.Tensor:
    """An FP8 cache is written by way of one in the model's type, which holds nothing but the step's tokens."""
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    num_kv_heads, is_fp8 = cache.k_CBKD.shape[2], cache.k_CBKD.dtype == FP8
    q_TND = qkv_TMD.new_empty(num_tokens, num_all_heads - 2 * num_kv_heads, head_dim)
    q_norm_D, k_norm_D = qk_norm_D or (qkv_TMD.new_ones(head_dim),) * 2
    keys, values, slot_T = cache.k_CBKD, cache.v_CBKD, slot_mapping_T
    if is_fp8:
        keys, values = (qkv_TMD.new_empty(num_tokens, 1, num_kv_heads, head_dim) for _ in range(2))
        slot_T = torch.arange(num_tokens)
    use_threads(qkv_TMD.numel() >= PARALLEL_ELEMENTS)
    elementwise.norm_rope_write(
        bits(qkv_TMD),
        cos_TD2.numpy(),
        sin_TD2.numpy(),
        qk_norm_D is not None,
        bits(q_norm_D),
        bits(k_norm_D),
        np.float32(eps),
        slot_T.numpy(),
        bits(keys),
        bits(values),
        bits(q_TND),
        *WHOLE,
    )
    if is_fp8:
        code_k, code_v, scale_k, scale_v = arrays_of(cache)
        elementwise.write_fp8(bits(keys.squeeze(1)), slot_mapping_T.numpy(), code_k, scale_k, *WHOLE)
        elementwise.write_fp8(bits(values.squeeze(1)), slot_mapping_T.numpy(), code_v, scale_v, *WHOLE)
    return q_TND


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    out_TF = gate_up_T2F.new_empty(gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2)
    use_threads(out_TF.numel() >= PARALLEL_ELEMENTS)
    elementwise.silu_mul(bits(gate_up_T2F), bits(out_TF), *WHOLE)
    return out_TF
