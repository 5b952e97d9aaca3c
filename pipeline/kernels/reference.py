"""Every kernel in plain torch: the oracle of the fast kernels, and the fallback where no faster one exists.

Norms and rotations are computed in float32 and rounded once, as transformers does.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.activations.act_quant import act_quant_oracles
from pipeline.kernels.adapters import AdapterTokens, LowRankUpdate
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, FP8_MAX, SMALLEST_SCALE, LayerCache
from pipeline.kernels.contract import Kernels
from pipeline.kernels.delta_net import delta_net
from pipeline.kernels.experts import LoopedExperts, route
from pipeline.kernels.linears import Linear
from pipeline.kernels.memory import on_device
from pipeline.kernels.routing import CLAMP, CLAMPED_ALPHA
from pipeline.weights.packed import LinearWeight


def prepare_linear(weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> Linear:
    """Return a linear with dense weights in `dtype`; quantized weights are dequantized once."""
    weight_NK = weight.dequantize(dtype).to(device)
    bias_N = None if weight.bias_N is None else weight.bias_N.to(device, dtype)
    return partial(F.linear, weight=weight_NK, bias=bias_N)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)  # a float32 weight is not rounded


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_TH = residual_TH + x_TH
    return rms_norm(residual_TH, weight_H, eps), residual_TH


def rope(x_TND: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) by the token's angles. cos and sin are float32."""
    half = x_TND.shape[-1] // 2
    low, high = x_TND[..., :half], x_TND[..., half:]
    cos, sin = cos_TD2.unsqueeze(1).to(x_TND.dtype), sin_TD2.unsqueeze(1).to(x_TND.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def to_fp8(x_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 codes and their scales (T, K), as defined in `kernels/cache.py`."""
    wide_TKD = x_TKD.float()
    largest_TK = wide_TKD.abs().amax(-1)
    is_sound_TK = largest_TK.isfinite()
    scale_TK = (largest_TK * (1.0 / FP8_MAX)).clamp_min(SMALLEST_SCALE)
    code_TKD = (wide_TKD * (1.0 / scale_TK)[..., None]).where(is_sound_TK[..., None], 0.0).to(FP8)
    return code_TKD, scale_TK.where(is_sound_TK, float("nan"))


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
    caches = (k_TKD, cache.k_CBKD, cache.k_scale_CKB), (v_TKD, cache.v_CBKD, cache.v_scale_CKB)
    for x_TKD, stored_CBKD, scale_CKB in caches:
        if scale_CKB is None:
            stored_CBKD.flatten(0, 1).index_copy_(0, slot_mapping_T, x_TKD.to(stored_CBKD.dtype))
        else:
            code_TKD, scale_TK = to_fp8(x_TKD)
            codes = stored_CBKD.view(torch.uint8).flatten(0, 1)
            codes.index_copy_(0, slot_mapping_T, code_TKD.view(torch.uint8))  # index_copy_ does not support FP8
            block_size = scale_CKB.shape[2]
            scale_CKB[slot_mapping_T // block_size, :, slot_mapping_T % block_size] = scale_TK


def read_kv(stored_CBKD: torch.Tensor, scale_CKB: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """Return whole blocks (C', B, K, D); FP8 is widened to float32."""
    if scale_CKB is None:
        return stored_CBKD[blocks]
    return stored_CBKD.view(torch.uint8)[blocks].view(FP8).float() * scale_CKB[blocks].transpose(1, 2)[..., None]


def norm_rope_write(
    qkv_TMD: torch.Tensor,
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: LayerCache,
    slot_mapping_T: torch.Tensor,
) -> torch.Tensor:
    num_kv_heads = cache.k_CBKD.shape[2]
    q_TND, k_TKD, v_TKD = qkv_TMD.split((qkv_TMD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if qk_norm_D is not None:
        q_TND, k_TKD = rms_norm(q_TND, qk_norm_D[0], eps), rms_norm(k_TKD, qk_norm_D[1], eps)
    write_kv(rope(k_TKD, cos_TD2, sin_TD2), v_TKD, cache, slot_mapping_T)
    return rope(q_TND, cos_TD2, sin_TD2)


def attention(
    q_TND: torch.Tensor,
    cache: LayerCache,
    attn_metadata: AttentionInput,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend sequence by sequence: gather its keys and values, mask, softmax, weighted sum."""
    out_TND = torch.empty_like(q_TND)
    group = q_TND.shape[1] // cache.k_CBKD.shape[2]
    for s, context in enumerate(attn_metadata.context_len_S.tolist()):
        start, stop = int(attn_metadata.query_start_S1[s]), int(attn_metadata.query_start_S1[s + 1])
        num_blocks = -(-context // attn_metadata.block_size)
        blocks = torch.from_numpy(attn_metadata.block_table_SM[s, :num_blocks].astype(np.int64)).to(q_TND.device)
        k_LKD = read_kv(cache.k_CBKD, cache.k_scale_CKB, blocks).flatten(0, 1)[:context]
        v_LKD = read_kv(cache.v_CBKD, cache.v_scale_CKB, blocks).flatten(0, 1)[:context]
        k_NLD = k_LKD.to(q_TND.dtype).repeat_interleave(group, 1).transpose(0, 1)
        v_NLD = v_LKD.to(q_TND.dtype).repeat_interleave(group, 1).transpose(0, 1)
        q_NQD = q_TND[start:stop].transpose(0, 1)
        key = torch.arange(context, device=q_TND.device)
        query = torch.arange(context - (stop - start), context, device=q_TND.device).unsqueeze(1)
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        score_NQL = (q_NQD @ k_NLD.transpose(1, 2)).float() * scale
        if softcap > 0:
            score_NQL = softcap * (score_NQL / softcap).tanh()
        score_NQL = score_NQL.masked_fill(~seen, float("-inf"))
        if sinks_N is not None:
            sink_NQ1 = sinks_N[:, None, None].expand(-1, stop - start, 1)
            score_NQL = torch.cat([score_NQL, sink_NQ1], dim=-1)
        weight_NQL = score_NQL.softmax(-1)[..., :context].to(q_TND.dtype)
        out_TND[start:stop] = (weight_NQL @ v_NLD).transpose(0, 1)
    return out_TND


def gate_mul(gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate_TF, up_TF = gate_TF.clamp(max=CLAMP), up_TF.clamp(-CLAMP, CLAMP)
        return gate_TF * (CLAMPED_ALPHA * gate_TF).sigmoid() * (up_TF + 1)
    return (F.silu(gate_TF) if activation == "silu" else F.gelu(gate_TF, approximate="tanh")) * up_TF


class LoopedLora:
    """Updates of a linear, added adapter by adapter."""

    def __init__(self, updates: Sequence[LowRankUpdate | None], dtype: torch.dtype, device: torch.device) -> None:
        self.updates = [
            update and LowRankUpdate(update.a_RK.to(device, dtype), update.b_NR.to(device, dtype)) for update in updates
        ]

    @property
    def num_bytes(self) -> int:
        return sum(update.num_bytes for update in self.updates if update is not None)

    def __call__(self, y_TN: torch.Tensor, x_TK: torch.Tensor, tokens: AdapterTokens) -> None:
        for adapter, rows in tokens.plan(_tokens_by_adapter):
            update = self.updates[adapter]
            if update is None:
                continue
            low_MR = x_TK[rows] @ update.a_RK.T
            if isinstance(rows, slice):
                y_TN[rows].addmm_(low_MR, update.b_NR.T)
            else:
                y_TN.index_add_(0, rows, low_MR @ update.b_NR.T)


def _tokens_by_adapter(tokens: AdapterTokens) -> list[tuple[int, slice | torch.Tensor]]:
    """Return each adapter of the step with its tokens: a slice if they are consecutive."""
    groups: list[tuple[int, slice | torch.Tensor]] = []
    for adapter in np.unique(tokens.adapter_T[tokens.adapter_T >= 0]).tolist():
        token_M = np.flatnonzero(tokens.adapter_T == adapter)
        first, stop = int(token_M[0]), int(token_M[-1]) + 1
        is_run = stop - first == len(token_M)
        groups.append((adapter, slice(first, stop) if is_run else on_device(token_M, tokens.device)))
    return groups


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    best_R, token_R = logits_RV.max(dim=-1)
    return torch.stack([token_R, torch.isfinite(best_R).long()])


def sample(logits_RV: torch.Tensor, sampling_params_5R: torch.Tensor) -> torch.Tensor:
    """Sample by sorting, with sums in float64. Equal weights mean equal differences of logits here."""
    wide_RV = logits_RV.float()
    best_R, token_R = wide_RV.max(dim=-1)
    finite_R = torch.isfinite(best_R)
    temperature_R1, top_k_R1, top_p_R1, min_p_R1, u_R1 = sampling_params_5R.unsqueeze(-1)
    is_sampled_R1 = (temperature_R1 > 0) & finite_R.unsqueeze(-1)
    scale_R1 = torch.where(is_sampled_R1, temperature_R1, 1.0).float()
    behind_RV = torch.where(is_sampled_R1, (best_R.unsqueeze(-1) - wide_RV) / scale_R1, 0.0)
    behind_RV, id_RV = behind_RV.sort(dim=-1, stable=True)
    w_RV = (-behind_RV).exp()
    kept_RV = (behind_RV <= behind_RV.gather(1, top_k_R1.long() - 1)) & (w_RV >= min_p_R1.float())
    w_RV = torch.where(kept_RV, w_RV, 0.0).double()
    sum_RV = w_RV.cumsum(dim=-1)
    kept_RV &= (top_p_R1 >= 1) | (sum_RV - w_RV < top_p_R1 * sum_RV[:, -1:])
    w_RV = torch.zeros_like(w_RV).scatter_(1, id_RV, torch.where(kept_RV, w_RV, 0.0))  # back in order of token ids
    sum_RV = w_RV.cumsum(dim=-1)
    positive_RV = w_RV > 0
    past_RV = positive_RV & (sum_RV > u_R1 * sum_RV[:, -1:])
    last_R = logits_RV.shape[1] - 1 - positive_RV.flip(1).byte().argmax(dim=-1)
    sampled_R = torch.where(past_RV.any(dim=-1), past_RV.byte().argmax(dim=-1), last_R)
    token_R = torch.where(is_sampled_R1[:, 0], sampled_R, torch.where(finite_R, token_R, 0))
    return torch.stack([token_R, finite_R.long()])


_KERNELS = ("linear", "add_rms_norm", "norm_rope_write", "attention", "delta_net", "rms_norm", "gate_mul", "route",
            "experts", "greedy", "sample")  # fmt: skip


def reference_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    return Kernels(
        prepare_linear=lambda weight: prepare_linear(weight, dtype, device),
        add_rms_norm=add_rms_norm,
        norm_rope_write=norm_rope_write,
        attention=attention,
        delta_net=delta_net,
        rms_norm=lambda x_TH, weight_H, eps: x_TH.copy_(rms_norm(x_TH, weight_H, eps)),
        gate_mul=gate_mul,
        route=route,
        prepare_experts=partial(LoopedExperts, gate_mul=gate_mul),
        greedy=greedy,
        sample=sample,
        prepare_lora=lambda updates: LoopedLora(updates, dtype, device),
        backends=dict.fromkeys(_KERNELS, "torch (reference)"),
        rounded=act_quant_oracles(
            lambda weight: prepare_linear(weight, torch.float32, device), "torch (reference), float32"
        ),
    )
