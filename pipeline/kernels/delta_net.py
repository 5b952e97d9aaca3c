"""Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next: a layer that keeps a state of fixed size instead of keys and
values.

Queries, keys and values pass a causal convolution over the last `conv_width` tokens and SiLU; queries and keys are
divided by their length. Each value head has a state S (Dk, Dv) and the query and key of the key head that it shares
with its neighbours. A token does, with decay g = -exp(A) softplus(a + dt) and rate beta = sigmoid(b):

    S <- exp(g) S            S <- S + k (beta (v - S^T k))^T            o = S^T q / sqrt(Dk)

The output is silu(z) * norm(o). Everything is computed in float32, token after token, so the results do not depend on
the steps in which a prompt is computed, unless states are kept in bfloat16: each step that advances a state rounds it.

**States lag.** A step may be undone and computed again, and its drafts rejected, but a state cannot be taken back. So a
step of at most `MAX_LAG` tokens of a sequence leaves its state as it was before them and keeps their inputs; the next
step first applies those that have become certain. `num_applied` tells which tokens a head's state contains, so
applying is done once, however often a step is repeated or interrupted. Steps of more tokens of a sequence, which are
prompts, advance its state at once: if one is undone, the sequence begins again (`Scheduler.undo`).

Suffixes: S sequences, T tokens, V value heads, C channels (queries, keys and values of all heads), W width of the
convolution, K and D values of a key and of a value head, L slots of states, P inputs kept for each of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.delta_shape import MAX_LAG, NUM_INPUTS, DeltaNet
from pipeline.kernels.memory import on_device, zeros


class DeltaWeights(NamedTuple):
    """Weights of a layer besides its linears, in float32. decay_V: -exp(A). norm_D: of each head's outputs."""

    shape: DeltaNet
    conv_WC: torch.Tensor
    decay_V: torch.Tensor
    dt_bias_V: torch.Tensor
    norm_D: torch.Tensor

    def to(self, device: torch.device) -> "DeltaWeights":
        return DeltaWeights(self.shape, *(tensor.to(device) for tensor in self[1:]))


@dataclass(frozen=True)
class StateCache:
    """States of one layer. inputs_LPC: of the token at position p at p % P: its channels, then b and a of each value
    head. num_applied_LV: tokens that the state contains."""

    state_LVKD: torch.Tensor  # float32 or bfloat16
    inputs_LPC: torch.Tensor  # in the model's type
    num_applied_LV: torch.Tensor  # int32

    @classmethod
    def allocate(cls, num_slots: int, shape: DeltaNet, dtype: torch.dtype, device: torch.device) -> "StateCache":
        num_inputs = shape.num_channels + 2 * shape.num_value_heads
        state = num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim
        return cls(
            zeros(state, getattr(torch, shape.state_dtype), device),
            zeros((num_slots, NUM_INPUTS, num_inputs), dtype, device),
            zeros((num_slots, shape.num_value_heads), torch.int32, device),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.state_LVKD, self.inputs_LPC, self.num_applied_LV

    def keep_inputs(self, qkvz_TX: torch.Tensor, ba_TX: torch.Tensor, attn_metadata: AttentionInput) -> None:
        """Keep the inputs of each sequence's last tokens of the step."""
        if _KEPT not in attn_metadata.plans:
            attn_metadata.plans[_KEPT] = _kept(attn_metadata, qkvz_TX.device)
        token_N, row_N = attn_metadata.plans[_KEPT]
        rows_NC, num_channels = self.inputs_LPC.flatten(0, 1), self.inputs_LPC.shape[2] - ba_TX.shape[1]
        rows_NC[:, :num_channels].index_copy_(0, row_N, qkvz_TX[token_N, :num_channels])
        rows_NC[:, num_channels:].index_copy_(0, row_N, ba_TX[token_N])


_KEPT = "kept inputs"


def _kept(attn_metadata: AttentionInput, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the step whose inputs are kept, and their places in the kept ones of all slots."""
    slot_S, stop_S = attn_metadata.state_slot_S, attn_metadata.query_start_S1[1:]
    assert slot_S is not None
    count_S = np.minimum(stop_S - attn_metadata.query_start_S1[:-1], NUM_INPUTS)
    behind_N = np.arange(int(count_S.sum())) - np.repeat(np.cumsum(count_S), count_S)  # the last token has -1
    position_N = np.repeat(attn_metadata.context_len_S, count_S) + behind_N
    row_N = np.repeat(slot_S, count_S) * NUM_INPUTS + position_N % NUM_INPUTS
    token_N = (np.repeat(stop_S, count_S) + behind_N).astype(np.int64)
    return on_device(token_N, device), on_device(row_N.astype(np.int64), device)


def delta_net(
    qkvz_TX: torch.Tensor,
    ba_TX: torch.Tensor,
    weights: DeltaWeights,
    eps: float,
    cache: StateCache,
    attn_metadata: AttentionInput,
) -> torch.Tensor:
    """Implement `Kernels.delta_net`."""
    shape, slot_S = weights.shape, attn_metadata.state_slot_S
    assert slot_S is not None
    num_channels, width = shape.num_channels, shape.conv_width
    out_TX = qkvz_TX.new_empty(len(qkvz_TX), shape.num_outputs)
    inputs_TX = torch.cat([qkvz_TX[:, :num_channels], ba_TX], dim=1)
    for s, (slot, end) in enumerate(zip(slot_S.tolist(), attn_metadata.context_len_S.tolist())):
        first, stop = attn_metadata.query_start_S1[s : s + 2].tolist()
        start = end - (stop - first)
        applied = min(int(cache.num_applied_LV[slot, 0]), start)  # the same in all heads; more only in dummy steps
        seen = torch.arange(max(applied - width + 1, 0), start, device=qkvz_TX.device)
        inputs_NX = torch.cat([cache.inputs_LPC[slot, seen % NUM_INPUTS], inputs_TX[first:stop]]).float()
        conv_CN = F.pad(inputs_NX[:, :num_channels].t(), (width - 1, 0))
        conv_CN = F.conv1d(conv_CN[None], weights.conv_WC.t()[:, None], groups=num_channels)[0]
        channels_NC, (b_NV, a_NV) = F.silu(conv_CN.t()), inputs_NX[:, num_channels:].chunk(2, dim=1)
        new = slice(applied - max(applied - width + 1, 0), None)  # the others are only seen by the convolution
        state_VKD = torch.zeros_like(cache.state_LVKD[slot], dtype=torch.float32)
        if applied:
            state_VKD.copy_(cache.state_LVKD[slot])
        out_NVD, state_at_start = _recur(
            shape, channels_NC[new], b_NV[new], a_NV[new], weights, state_VKD, start - applied
        )
        z_NVD = qkvz_TX[first:stop, num_channels:].view(-1, shape.num_value_heads, shape.value_dim)
        out_TX[first:stop] = gated_norm(out_NVD[start - applied :], z_NVD, weights.norm_D, eps).flatten(1)
        is_prompt = stop - first > MAX_LAG
        cache.state_LVKD[slot] = state_VKD if is_prompt else state_at_start
        cache.num_applied_LV[slot] = end if is_prompt else start
    cache.keep_inputs(qkvz_TX, ba_TX, attn_metadata)
    return out_TX


def _recur(
    shape: DeltaNet,
    channels_NC: torch.Tensor,
    b_NV: torch.Tensor,
    a_NV: torch.Tensor,
    weights: DeltaWeights,
    state_VKD: torch.Tensor,
    num_lagging: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the state in place by N tokens. Return their outputs (N, V, D) and the state after the first
    `num_lagging` of them."""
    keys = shape.num_key_heads * shape.key_dim
    q_NC, k_NC, v_NC = channels_NC.split((keys, keys, shape.num_outputs), dim=1)
    repeats = shape.num_value_heads // shape.num_key_heads
    q_NVK, k_NVK = (
        unit_length(x_NC.view(-1, shape.num_key_heads, shape.key_dim)).repeat_interleave(repeats, dim=1)
        for x_NC in (q_NC, k_NC)
    )
    q_NVK, v_NVD = q_NVK * shape.key_dim**-0.5, v_NC.view(-1, shape.num_value_heads, shape.value_dim)
    decay_NV = (weights.decay_V * F.softplus(a_NV + weights.dt_bias_V)).exp()
    rate_NV, out_NVD, before = b_NV.sigmoid(), torch.empty_like(v_NVD), state_VKD.clone()
    for n in range(len(v_NVD)):
        if n == num_lagging:
            before = state_VKD.clone()
        state_VKD *= decay_NV[n, :, None, None]
        k_VK1 = k_NVK[n, :, :, None]
        delta_VD = (v_NVD[n] - (state_VKD * k_VK1).sum(1)) * rate_NV[n, :, None]
        state_VKD += k_VK1 * delta_VD[:, None]
        out_NVD[n] = (state_VKD * q_NVK[n, :, :, None]).sum(1)
    return out_NVD, before


def unit_length(x_NVK: torch.Tensor) -> torch.Tensor:
    return x_NVK * torch.rsqrt(x_NVK.square().sum(-1, keepdim=True) + UNIT_EPS)


def gated_norm(out_NVD: torch.Tensor, z_NVD: torch.Tensor, norm_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return silu(z) * norm(out), in z's type; the norm is rounded to it first, as transformers does."""
    normed = out_NVD * torch.rsqrt(out_NVD.square().mean(-1, keepdim=True) + eps)
    return (normed.to(z_NVD.dtype).float() * norm_D * F.silu(z_NVD.float())).to(z_NVD.dtype)


UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys."""
