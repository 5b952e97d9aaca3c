"""Gated DeltaNet on CPU, compiled by numba: each head of each sequence token after token (`kernels/delta_net.py`)."""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import math

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cpu.compile.numerics import as_in, bits, exp, wide
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, PARALLEL_ELEMENTS, kernel, parallel_for, use_threads
from pipeline.kernels.delta_net import UNIT_EPS, DeltaWeights, StateCache
from pipeline.kernels.delta_shape import MAX_LAG

_UNIT_EPS = np.float32(UNIT_EPS)
_TOKENS = 16  # of a sequence that are computed together
_COLUMNS = 128  # values of a head computed together


@kernel()
def delta_net_kernel(
    qkvz_TX, ba_TX, conv_WC, decay_V, dt_bias_V, norm_D, eps, num_key_heads, state_LVKD, inputs_LPC, num_applied_LV,
    slot_S, query_start_S1, context_len_S, max_lag, out_TX, begin, end
):  # fmt: skip
    """Compute one value head of one sequence per item, and advance its state."""
    num_heads, key_dim, value_dim = state_LVKD.shape[1:]
    if end < 0:
        return parallel_for(len(slot_S) * num_heads)
    weights = conv_WC, decay_V, dt_bias_V
    z_at = conv_WC.shape[1]
    qk, v, out = (np.empty((_TOKENS, 2, key_dim), np.float32), np.empty((_TOKENS, value_dim), np.float32),
                  np.empty((_TOKENS, value_dim), np.float32))  # fmt: skip
    rates, buffer = np.empty((_TOKENS, 2), np.float32), np.empty((key_dim, value_dim), np.float32)
    for item in range(begin, end):
        s, h = item // num_heads, item % num_heads
        slot, first = slot_S[s], query_start_S1[s]
        count = query_start_S1[s + 1] - first
        start = context_len_S[s] - count
        kept, inputs_PC = state_LVKD[slot, h], inputs_LPC[slot]
        state = _float32_state(kept, buffer)
        at = h // (num_heads // num_key_heads) * key_dim, num_key_heads * key_dim, h, start, first
        applied = num_applied_LV[slot, h] if start > 0 else 0
        if applied == 0:
            state[:] = np.float32(0.0)
        lagging = start - applied
        if count > 1 and lagging > 0:
            _read(qk, v, rates, qkvz_TX, ba_TX, inputs_PC, weights, applied, lagging, at)
            _recur(state, qk, v, rates, out, lagging, lagging)
            lagging = 0
        if 1 < count <= max_lag:
            _keep(kept, state)
            buffer[:] = state
            state = buffer
        for done in range(0, count, _TOKENS):
            num = min(_TOKENS, count - done)
            _read(qk, v, rates, qkvz_TX, ba_TX, inputs_PC, weights, start + done - lagging, lagging + num, at)
            _recur(state, qk, v, rates, out, lagging + num, num if count > 1 else lagging)
            for n in range(num):
                t, out_D, total = first + done + n, out[lagging + n], np.float32(0.0)
                for i in range(value_dim):
                    total += out_D[i] * out_D[i]
                scale = np.float32(1.0) / np.sqrt(total / np.float32(value_dim) + eps)
                z = qkvz_TX[t, z_at + h * value_dim : z_at + (h + 1) * value_dim]
                target = out_TX[t, h * value_dim : (h + 1) * value_dim]
                for i in range(value_dim):
                    gate = wide(z[i])
                    gate = gate / (np.float32(1.0) + exp(-gate))
                    target[i] = as_in(target, wide(as_in(target, out_D[i] * scale)) * norm_D[i] * gate)
        if count == 1 or count > max_lag:
            _keep(kept, state)
        num_applied_LV[slot, h] = start + count if count > max_lag else start


def _float32_state(kept, buffer):
    raise NotImplementedError("only inside compiled code")


@overload(_float32_state, inline="always")
def _kept_or_wide(kept, buffer):
    """Return the kept state, or if it is bfloat16, the buffer with its values."""
    if kept.dtype != types.uint16:
        return lambda kept, buffer: kept

    def widened(kept, buffer):
        for j in range(len(kept)):
            for i in range(kept.shape[1]):
                buffer[j, i] = wide(kept[j, i])
        return buffer

    return widened


def _keep(kept, state):
    raise NotImplementedError("only inside compiled code")


@overload(_keep, inline="always")
def _rounded_or_kept(kept, state):
    """Round the state to a kept one in bfloat16; one in float32 is the state itself."""
    if kept.dtype != types.uint16:
        return lambda kept, state: None

    def rounded(kept, state):
        for j in range(len(kept)):
            for i in range(kept.shape[1]):
                kept[j, i] = as_in(kept, state[j, i])

    return rounded


@njit(inline="always")
def _read(qk, v, rates, qkvz_TX, ba_TX, inputs_PC, weights, position, num, at):
    """Compute queries, keys, values, decays and rates of `num` tokens of a head, from `position` on."""
    (conv_WC, decay_V, dt_bias_V), (qk_at, k_at, h, start, first) = weights, at
    num_channels, num_heads, key_dim, value_dim = conv_WC.shape[1], len(decay_V), qk.shape[2], v.shape[1]
    for n in range(num):
        p = position + n
        _convolve(qk[n, 0], qk_at, p, qkvz_TX, inputs_PC, conv_WC, start, first)
        _convolve(qk[n, 1], k_at + qk_at, p, qkvz_TX, inputs_PC, conv_WC, start, first)
        _convolve(v[n], 2 * k_at + h * value_dim, p, qkvz_TX, inputs_PC, conv_WC, start, first)
        for kind in range(2):
            x, total = qk[n, kind], np.float32(0.0)
            for i in range(key_dim):
                total += x[i] * x[i]
            scale = np.float32(1.0) / np.sqrt(total + _UNIT_EPS)
            if kind == 0:
                scale /= np.sqrt(np.float32(key_dim))
            for i in range(key_dim):
                x[i] *= scale
        if p >= start:
            b, a = wide(ba_TX[first + p - start, h]), wide(ba_TX[first + p - start, num_heads + h])
        else:
            kept = inputs_PC[p % len(inputs_PC)]
            b, a = wide(kept[num_channels + h]), wide(kept[num_channels + num_heads + h])
        a += dt_bias_V[h]
        softplus = max(a, np.float32(0.0)) + np.float32(math.log1p(math.exp(-abs(a))))
        softplus = softplus if a == a else a
        rates[n, 0] = np.float32(math.exp(decay_V[h] * softplus))
        rates[n, 1] = np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-b)))


@njit(inline="always")
def _convolve(target, channel, position, qkvz_TX, inputs_PC, conv_WC, start, first):
    """Set the target to SiLU of the convolution of its channels, the first of which is `channel`."""
    width = len(conv_WC)
    target[:] = np.float32(0.0)
    for w in range(width):
        p = position - width + 1 + w
        if p >= 0:
            row = qkvz_TX[first + p - start] if p >= start else inputs_PC[p % len(inputs_PC)]
            source, weight = row[channel : channel + len(target)], conv_WC[w, channel : channel + len(target)]
            for i in range(len(target)):
                target[i] += weight[i] * wide(source[i])
    for i in range(len(target)):
        target[i] = target[i] / (np.float32(1.0) + exp(-target[i]))


@njit(inline="always")
def _recur(state, qk, v, rates, out, num, num_applied):
    """Write the outputs of `num` tokens of a head, and advance its state (Dk, Dv) by the first `num_applied` of them:
    all, or all but the last one. Then the output of the last one before it is not written: it has passed already."""
    key_dim, value_dim = state.shape
    seen, delta, following = (np.empty(_COLUMNS, np.float32), np.empty(_COLUMNS, np.float32),
                              np.empty(_COLUMNS, np.float32))  # fmt: skip
    for first in range(0, value_dim, _COLUMNS):
        columns = min(_COLUMNS, value_dim - first)
        k, q, target = qk[0, 1], qk[0, 0], out[0, first : first + columns]
        for i in range(columns):
            seen[i] = target[i] = np.float32(0.0)
        for j in range(key_dim):
            row = state[j, first : first + columns]
            for i in range(columns):
                seen[i] += row[i] * k[j]
                target[i] += row[i] * q[j]
        for n in range(num_applied):
            read = num - 1 if n == num_applied - 1 else n  # the token whose query this pass multiplies
            target, decay, rate = out[read, first : first + columns], rates[n, 0], rates[n, 1]
            q, k, next_k = qk[read, 0], qk[n, 1], qk[min(n + 1, num - 1), 1]
            for i in range(columns):
                delta[i] = (v[n, first + i] - decay * seen[i]) * rate
                target[i] = following[i] = np.float32(0.0)
            for j in range(key_dim):
                row = state[j, first : first + columns]
                for i in range(columns):
                    row[i] = decay * row[i] + k[j] * delta[i]
                    target[i] += row[i] * q[j]
                    following[i] += row[i] * next_k[j]
            seen, following = following, seen
        if num_applied < num:
            last, product = num - 1, np.float32(0.0)
            k, q, target = qk[last, 1], qk[last, 0], out[last, first : first + columns]
            for j in range(key_dim):
                product += k[j] * q[j]
            for i in range(columns):
                change = (v[last, first + i] - rates[last, 0] * seen[i]) * rates[last, 1]
                target[i] = rates[last, 0] * target[i] + product * change


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
    qkvz_TX, ba_TX = qkvz_TX.contiguous(), ba_TX.contiguous()
    out_TX = qkvz_TX.new_empty(len(qkvz_TX), shape.num_outputs)
    use_threads(qkvz_TX.numel() * shape.key_dim >= PARALLEL_ELEMENTS)
    delta_net_kernel(
        bits(qkvz_TX),
        bits(ba_TX),
        *(weight.numpy() for weight in weights[1:]),
        np.float32(eps),
        shape.num_key_heads,
        bits(cache.state_LVKD),
        bits(cache.inputs_LPC),
        cache.num_applied_LV.numpy(),
        slot_S,
        attn_metadata.query_start_S1,
        attn_metadata.context_len_S,
        MAX_LAG,
        bits(out_TX),
        *ALL_ITEMS,
    )
    cache.keep_inputs(qkvz_TX, ba_TX, attn_metadata)
    return out_TX
