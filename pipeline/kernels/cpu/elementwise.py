"""Elementwise kernels of a layer on CPU. Each operation is one pass, compiled by numba.

Functions whose names end in `_kernel` take arrays: float32, or bfloat16 as its bits in uint16. Keys and values may be
FP8 codes in uint8 with scales (`kernels/cache.py`). The other functions implement `contract.Kernels` and take tensors.
Everything is computed in float32 and rounded once. NaNs propagate, so that broken rows are detected. Suffixes are those
of `kernels/contract.py`.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import numpy as np
import torch

from pipeline.kernels.cache import FP8, FP8_MAX, SMALLEST_SCALE, LayerCache
from pipeline.kernels.cpu.compile.numerics import (
    arrays_of,
    as_in,
    bits,
    bits_of_float,
    code_of,
    exp,
    float_of_bits,
    wide,
)
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, PARALLEL_ELEMENTS, kernel, parallel_for, use_threads
from pipeline.kernels.routing import CLAMP, CLAMPED_ALPHA

_INVERSE_FP8_MAX, _SMALLEST_SCALE = np.float32(1.0 / FP8_MAX), np.float32(SMALLEST_SCALE)
_GELU_1, _GELU_3 = np.float32(2 * (2 / np.pi) ** 0.5), np.float32(2 * (2 / np.pi) ** 0.5 * 0.044715)
_ALPHA, _CLAMP = np.float32(CLAMPED_ALPHA), np.float32(CLAMP)
GATES = "silu", "gelu_tanh", "clamped_swiglu"
_INFINITY_BITS = np.uint32(0xFF << 23)


@kernel()
def add_rms_norm_kernel(x_TH, residual_TH, weight_H, eps, begin, end):
    """Add x to residual; set x to the norm of the residual after its rounding."""
    num_tokens, hidden = x_TH.shape
    if end < 0:
        return parallel_for(num_tokens)
    for t in range(begin, end):
        x, residual = x_TH[t], residual_TH[t]
        total = np.float32(0.0)
        for i in range(hidden):
            residual[i] = as_in(residual, wide(residual[i]) + wide(x[i]))
            total += wide(residual[i]) * wide(residual[i])
        scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
        for i in range(hidden):
            x[i] = as_in(x, wide(residual[i]) * scale * wide(weight_H[i]))


@kernel()
def rms_norm_kernel(x_TH, weight_H, eps, begin, end):
    """Replace rows by their norms."""
    num_tokens, hidden = x_TH.shape
    if end < 0:
        return parallel_for(num_tokens)
    for t in range(begin, end):
        x = x_TH[t]
        total = np.float32(0.0)
        for i in range(hidden):
            total += wide(x[i]) * wide(x[i])
        scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
        for i in range(hidden):
            x[i] = as_in(x, wide(x[i]) * scale * wide(weight_H[i]))


@kernel()
def norm_rope_write_kernel(
    qkv_TMD, cos_TD2, sin_TD2, with_norm, q_norm_D, k_norm_D, eps, slot_T, k_CBKD, v_CBKD, q_TND, begin, end
):
    """Write each query head to `q_TND` and each key and value head to its slot; norm and rotate queries and keys.

    Without norms the weights are ones: one loop serves both cases and compiles in half the time of two.
    """
    num_tokens, num_heads, head_dim = q_TND.shape
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    half = head_dim // 2
    if end < 0:
        return parallel_for(num_tokens)
    for t in range(begin, end):
        block, offset = slot_T[t] // block_size, slot_T[t] % block_size
        cos, sin = cos_TD2[t], sin_TD2[t]
        for h in range(num_heads + num_kv_heads):
            source = qkv_TMD[t, h]
            target = q_TND[t, h] if h < num_heads else k_CBKD[block, offset, h - num_heads]
            weight = q_norm_D if h < num_heads else k_norm_D
            scale = np.float32(1.0)
            if with_norm:
                total = np.float32(0.0)
                for i in range(head_dim):
                    total += wide(source[i]) * wide(source[i])
                scale /= np.sqrt(total / np.float32(head_dim) + eps)
            low_in, high_in, low_out, high_out = source[:half], source[half:], target[:half], target[half:]
            low_weight, high_weight = weight[:half], weight[half:]
            for i in range(half):
                low = wide(low_in[i]) * scale * wide(low_weight[i])
                high = wide(high_in[i]) * scale * wide(high_weight[i])
                low_out[i] = as_in(low_out, low * cos[i] - high * sin[i])
                high_out[i] = as_in(high_out, high * cos[i] + low * sin[i])
        for h in range(num_kv_heads):
            for i in range(head_dim):
                v_CBKD[block, offset, h, i] = qkv_TMD[t, num_heads + num_kv_heads + h, i]


@kernel(fastmath=False)
def write_fp8_kernel(x_TKD, slot_T, code_CBKD, scale_CKB, begin, end):
    """Write each head of `x_TKD` to its slot as FP8 codes and a scale. Without fastmath, which would change codes."""
    num_tokens, num_heads, head_dim = x_TKD.shape
    block_size = code_CBKD.shape[1]
    if end < 0:
        return parallel_for(num_tokens)
    for t in range(begin, end):
        block, offset = slot_T[t] // block_size, slot_T[t] % block_size
        for h in range(num_heads):
            x, code = x_TKD[t, h], code_CBKD[block, offset, h]
            max_bits = np.uint32(0)  # of the largest magnitude; bits of infinity and NaN exceed those of any number
            for i in range(head_dim):
                max_bits = max(max_bits, bits_of_float(wide(x[i])) & np.uint32(0x7FFFFFFF))
            is_sound = max_bits < _INFINITY_BITS
            scale = max(float_of_bits(max_bits) * _INVERSE_FP8_MAX, _SMALLEST_SCALE) if is_sound else np.float32(np.nan)
            inverse = np.float32(1.0) / scale
            for i in range(head_dim):
                code[i] = code_of(wide(x[i]) * inverse) if is_sound else np.uint8(0)
            scale_CKB[block, h, offset] = scale


@kernel()
def gate_mul_kernel(gate_up_T2F, kind, out_TF, begin, end):
    """Write activation(gate) * up. kind: index in `GATES`. "gelu_tanh" is x / (1 + exp(-2 c (x + 0.044715 x^3))), with
    c = sqrt(2 / pi)."""
    num_tokens, width = out_TF.shape
    if end < 0:
        return parallel_for(num_tokens)
    for t in range(begin, end):
        gate, up, out = gate_up_T2F[t, :width], gate_up_T2F[t, width:], out_TF[t]
        if kind == 1:
            for i in range(width):
                g = wide(gate[i])
                power = g * (_GELU_1 + _GELU_3 * g * g)
                out[i] = as_in(out, g / (np.float32(1.0) + exp(-power)) * wide(up[i]))
        elif kind == 2:
            for i in range(width):
                g, u = wide(gate[i]), wide(up[i])
                g = _CLAMP if g > _CLAMP else g  # `min` would drop a NaN
                u = _CLAMP if u > _CLAMP else -_CLAMP if u < -_CLAMP else u
                out[i] = as_in(out, g / (np.float32(1.0) + exp(-_ALPHA * g)) * (u + np.float32(1.0)))
        else:
            for i in range(width):
                g = wide(gate[i])
                out[i] = as_in(out, g / (np.float32(1.0) + exp(-g)) * wide(up[i]))


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set `x_TH` to the norm and `residual_TH` to the sum, in place."""
    use_threads(x_TH.numel() >= PARALLEL_ELEMENTS)
    add_rms_norm_kernel(bits(x_TH), bits(residual_TH), bits(weight_H), np.float32(eps), *ALL_ITEMS)
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
    """Implement `Kernels.norm_rope_write`. FP8 is written through a temporary cache of the step's tokens."""
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    num_kv_heads, is_fp8 = cache.k_CBKD.shape[2], cache.k_CBKD.dtype == FP8
    q_TND = qkv_TMD.new_empty(num_tokens, num_all_heads - 2 * num_kv_heads, head_dim)
    q_norm_D, k_norm_D = qk_norm_D or (qkv_TMD.new_ones(head_dim),) * 2
    keys, values, slot_T = cache.k_CBKD, cache.v_CBKD, slot_mapping_T
    if is_fp8:
        keys, values = (qkv_TMD.new_empty(num_tokens, 1, num_kv_heads, head_dim) for _ in range(2))
        slot_T = torch.arange(num_tokens)
    use_threads(qkv_TMD.numel() >= PARALLEL_ELEMENTS)
    norm_rope_write_kernel(
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
        *ALL_ITEMS,
    )
    if is_fp8:
        code_k, code_v, scale_k, scale_v = arrays_of(cache)
        write_fp8_kernel(bits(keys.squeeze(1)), slot_mapping_T.numpy(), code_k, scale_k, *ALL_ITEMS)
        write_fp8_kernel(bits(values.squeeze(1)), slot_mapping_T.numpy(), code_v, scale_v, *ALL_ITEMS)
    return q_TND


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Set `x_TH` to its norm, in place."""
    use_threads(x_TH.numel() >= PARALLEL_ELEMENTS)
    rms_norm_kernel(bits(x_TH), bits(weight_H), np.float32(eps), *ALL_ITEMS)
    return x_TH


def gate_mul(gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    out_TF = gate_up_T2F.new_empty(gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2)
    use_threads(out_TF.numel() >= PARALLEL_ELEMENTS)
    gate_mul_kernel(bits(gate_up_T2F), GATES.index(activation), bits(out_TF), *ALL_ITEMS)
    return out_TF
