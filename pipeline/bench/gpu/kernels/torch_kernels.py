"""What torch itself has for the work of our kernels, to compare with, as far as this torch and this card have it.

Written for CUDA after torch's own tests and never run: a result that is off by more than its format's rounding has no
time.

Suffixes as in `kernels/contract.py`; N and K of a weight are its outputs and inputs, G its groups.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.kernels.contract import Linear
from pipeline.weights.packed import GroupIntWeight

TORCH_INT4, TORCH_FP8 = "torch int4", "torch fp8"
TORCH_PATHS = {TORCH_INT4: 5e-2, TORCH_FP8: 1e-1}
"""Path -> the error that its format may have: scales in bfloat16; weights and activations of 3 bits of fraction."""
INNER_TILES = 8  # of K in torch's packed form
INT4_GROUPS = (32, 64, 128, 256)
FP8_MAX = 448.0
FP8_CAPABILITY = (8, 9)


def torch_paths(weight: GroupIntWeight, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Linear]]:
    """Path -> what packs an int4 weight for it."""
    found: dict[str, Callable[[], Linear]] = {}
    has_fp8 = hasattr(torch.ops.aten, "_scaled_mm")
    has_int4 = hasattr(torch.ops.aten, "_weight_int4pack_mm") and hasattr(torch.ops.aten, "_convert_weight_to_int4pack")
    if has_int4 and dtype == torch.bfloat16 and weight.group_size in INT4_GROUPS:
        found[TORCH_INT4] = lambda: int4_product(weight, device)
    if has_fp8 and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        found[TORCH_FP8] = lambda: fp8_product(weight, dtype, device)
    return found


def int4_product(weight: GroupIntWeight, device: torch.device) -> Linear:
    """By `_weight_int4pack_mm`, for which a weight is (q - 8) * scale + zero, in bfloat16."""
    q_NK = weight.q_NK.to(device, torch.int32)
    pairs_NK = ((q_NK[:, ::2] << 4) | q_NK[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs_NK, INNER_TILES)
    scales_NG, zeros_NG = weight.scales_NG.float(), weight.zeros_NG.float()
    both_GN2 = torch.stack([scales_NG, (8.0 - zeros_NG) * scales_NG], dim=2).transpose(0, 1)
    both_GN2 = both_GN2.to(device, torch.bfloat16).contiguous()
    return lambda x_MK: torch.ops.aten._weight_int4pack_mm(x_MK, packed, weight.group_size, both_GN2)


def fp8_product(weight: GroupIntWeight, dtype: torch.dtype, device: torch.device) -> Linear:
    """By `_scaled_mm` with one scale for the weight and one for all activations, whose rounding is in it."""
    dense_NK = weight.dequantize(torch.float32).to(device)
    scale = dense_NK.abs().amax() / FP8_MAX
    rounded_KN = (dense_NK / scale).to(torch.float8_e4m3fn).t()

    def product(x_MK: torch.Tensor) -> torch.Tensor:
        x_scale = x_MK.abs().amax().float() / FP8_MAX
        x_rounded_MK = (x_MK / x_scale).to(torch.float8_e4m3fn)
        return torch.ops.aten._scaled_mm(x_rounded_MK, rounded_KN, x_scale, scale, out_dtype=dtype)

    return product


def varlen_attention(
    counts: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], object] | None:
    """Causal attention of prompts of `counts` tokens by torch's kernel for ragged prompts; None where there is none.
    q, k, v: (prompts, heads, tokens, head size), as scaled_dot_product_attention takes them."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
    if "enable_gqa" in takes:
        how["enable_gqa"] = True
    else:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    rows = [each.transpose(1, 2).flatten(0, 1).contiguous() for each in (q, k, v)]
    start_S1 = torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32)).to(q.device)
    most = max(counts)
    ragged: Any = varlen_attn  # whose parameters are other ones from release to release
    return lambda: ragged(*rows, start_S1, start_S1, most, most, **how)
