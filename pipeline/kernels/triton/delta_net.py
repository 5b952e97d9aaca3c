"""Gated DeltaNet on a GPU: two launches (`kernels/delta_net.py`).

One program computes a value head of a sequence, token after token, with the head's state in registers: first the kept
tokens that have become certain, then those of the step. It reads and writes the state once. A second kernel keeps the
step's inputs. Suffixes: those of `kernels/delta_net.py`.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import numpy as np
import torch
import triton
import triton.language as tl

from pipeline.kernels.attention_input import AttentionInput, CapturedStates
from pipeline.kernels.delta_net import UNIT_EPS, DeltaWeights, StateCache
from pipeline.kernels.delta_shape import MAX_LAG, NUM_INPUTS
from pipeline.kernels.memory import on_device
from pipeline.kernels.triton.launch import Launch, power_of_two

_UNIT_EPS = tl.constexpr(UNIT_EPS)
_CHANNELS = 1024  # channels per program that keeps inputs
_STATES = "numbers of the sequences"


@triton.jit
def _convolved(
    new_ptr, kept_ptr, conv_ptr, channel, mask, position, start, new_stride, num_kept, C: tl.constexpr, W: tl.constexpr,
    KEPT: tl.constexpr
):  # fmt: skip
    """Return SiLU of the convolution at a position. new_ptr: inputs of the step's first token, at `start`."""
    total = tl.zeros(channel.shape, tl.float32)
    for w in tl.static_range(W):
        p = position - (W - 1) + w
        weight = tl.load(conv_ptr + w * C + channel, mask=mask, other=0.0)
        new = tl.load(new_ptr + (p - start) * new_stride + channel, mask=mask & (p >= start), other=0.0)
        kept_at = kept_ptr + p % KEPT * num_kept + channel
        kept = tl.load(kept_at, mask=mask & (p >= 0) & (p < start), other=0.0)
        total += weight * (new.to(tl.float32) + kept.to(tl.float32))
    return total / (1.0 + tl.exp(-total))


@triton.jit(do_not_specialize=["numbers_stride"])
def _delta_net(
    qkvz_ptr,
    ba_ptr,
    conv_ptr,
    decay_ptr,
    dt_bias_ptr,
    norm_ptr,
    state_ptr,
    inputs_ptr,
    applied_ptr,
    numbers_ptr,
    out_ptr,
    qkvz_stride,
    ba_stride,
    numbers_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    W: tl.constexpr,
    LAG: tl.constexpr,
    KEPT: tl.constexpr,
):
    """KEYS, VALUES: the head's dimensions, rounded up to powers of two."""
    C: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    NUM_KEPT: tl.constexpr = C + 2 * HEADS
    s, h = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(numbers_ptr + s), tl.load(numbers_ptr + numbers_stride + s)
    count, end = tl.load(numbers_ptr + 2 * numbers_stride + s), tl.load(numbers_ptr + 3 * numbers_stride + s)
    start = end - count
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    q_channel = h // (HEADS // KEY_HEADS) * KEY_DIM + key
    k_channel, v_channel = KEY_HEADS * KEY_DIM + q_channel, 2 * KEY_HEADS * KEY_DIM + h * VALUE_DIM + value
    new_ptr, new_ba_ptr = qkvz_ptr + first * qkvz_stride, ba_ptr + first * ba_stride
    kept_ptr, applied_at = inputs_ptr + slot * KEPT * NUM_KEPT, applied_ptr + slot * HEADS + h
    state_at = state_ptr + (slot * HEADS + h) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    inside = is_key[:, None] & is_value[None, :]
    applied = tl.where(start > 0, tl.load(applied_at).to(tl.int64), 0)
    state = tl.load(state_at, mask=inside & (applied > 0), other=0.0).to(tl.float32)
    decay_rate, dt_bias = tl.load(decay_ptr + h), tl.load(dt_bias_ptr + h)
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0)
    for p in range(applied, end):
        if (p == start) & (count <= LAG) & (applied < start):
            tl.store(state_at, state.to(state_ptr.dtype.element_ty), mask=inside)
        q = _convolved(new_ptr, kept_ptr, conv_ptr, q_channel, is_key, p, start, qkvz_stride, NUM_KEPT, C, W, KEPT)
        k = _convolved(new_ptr, kept_ptr, conv_ptr, k_channel, is_key, p, start, qkvz_stride, NUM_KEPT, C, W, KEPT)
        v = _convolved(new_ptr, kept_ptr, conv_ptr, v_channel, is_value, p, start, qkvz_stride, NUM_KEPT, C, W, KEPT)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _UNIT_EPS) * KEY_DIM**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _UNIT_EPS)
        if p >= start:
            ba_at = new_ba_ptr + (p - start) * ba_stride + h
        else:
            ba_at = kept_ptr + p % KEPT * NUM_KEPT + C + h
        b, a = tl.load(ba_at).to(tl.float32), tl.load(ba_at + HEADS).to(tl.float32) + dt_bias
        softplus = tl.where(a > 0, a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        state = state * tl.exp(decay_rate * softplus)
        delta = (v - tl.sum(state * k[:, None], axis=0)) / (1.0 + tl.exp(-b))
        state += k[:, None] * delta[None, :]
        if p >= start:
            out = tl.sum(state * q[:, None], axis=0)
            out = out * tl.rsqrt(tl.sum(out * out, axis=0) / VALUE_DIM + eps)
            z_at = new_ptr + (p - start) * qkvz_stride + C + h * VALUE_DIM + value
            z = tl.load(z_at, mask=is_value, other=0.0).to(tl.float32)
            out = out.to(out_ptr.dtype.element_ty).to(tl.float32) * norm * z / (1.0 + tl.exp(-z))
            out_at = out_ptr + (first + p - start) * (HEADS * VALUE_DIM) + h * VALUE_DIM + value
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_value)
    if count > LAG:
        tl.store(state_at, state.to(state_ptr.dtype.element_ty), mask=inside)
        tl.store(applied_at, end.to(tl.int32))
    else:
        tl.store(applied_at, start.to(tl.int32))


@triton.jit(do_not_specialize=["numbers_stride"])
def _keep_inputs(
    qkvz_ptr,
    ba_ptr,
    inputs_ptr,
    numbers_ptr,
    qkvz_stride,
    ba_stride,
    numbers_stride,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Keep the inputs of one of a sequence's last tokens."""
    s, behind = tl.program_id(0), tl.program_id(1) + 1
    slot, first = tl.load(numbers_ptr + s), tl.load(numbers_ptr + numbers_stride + s)
    count = tl.load(numbers_ptr + 2 * numbers_stride + s)
    if behind <= count:
        stop, position = first + count, tl.load(numbers_ptr + 3 * numbers_stride + s) - behind
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
        x = tl.load(qkvz_ptr + (stop - behind) * qkvz_stride + channel, mask=channel < C, other=0.0)
        number = channel - C
        is_ba = (number >= 0) & (number < 2 * HEADS)
        x += tl.load(ba_ptr + (stop - behind) * ba_stride + number, mask=is_ba, other=0.0)
        kept_at = inputs_ptr + (slot * KEPT + position % KEPT) * (C + 2 * HEADS) + channel
        tl.store(kept_at, x, mask=channel < C + 2 * HEADS)


def delta_net(
    qkvz_TX: torch.Tensor,
    ba_TX: torch.Tensor,
    weights: DeltaWeights,
    eps: float,
    cache: StateCache,
    attn_metadata: AttentionInput,
) -> torch.Tensor:
    """Implement `Kernels.delta_net`."""
    states = attn_metadata.captured_states or attn_metadata.plans.get(_STATES)
    if states is None:
        states = attn_metadata.plans[_STATES] = _states_of(attn_metadata, qkvz_TX.device)
    out_TX = qkvz_TX.new_empty(len(qkvz_TX), weights.shape.num_outputs)
    if len(qkvz_TX):
        for launch in delta_net_launches(qkvz_TX, ba_TX, weights, eps, cache, states, out_TX):
            launch.run()
    return out_TX


def _states_of(attn_metadata: AttentionInput, device: torch.device) -> CapturedStates:
    """Return the numbers of a step that is not captured."""
    start_S1, slot_S = attn_metadata.query_start_S1, attn_metadata.state_slot_S
    assert slot_S is not None
    count_S = np.diff(start_S1)
    numbers_4S = np.stack([slot_S, start_S1[:-1], count_S, attn_metadata.context_len_S]).astype(np.int64)
    return CapturedStates(on_device(numbers_4S, device), int(count_S.max()))


def delta_net_launches(
    qkvz_TX: torch.Tensor,
    ba_TX: torch.Tensor,
    weights: DeltaWeights,
    eps: float,
    cache: StateCache,
    states: CapturedStates,
    out_TX: torch.Tensor,
) -> list[Launch]:
    """Return the launches."""
    shape, (numbers_4S, max_count) = weights.shape, states
    num_sequences = numbers_4S.shape[1]
    assert qkvz_TX.stride(1) == ba_TX.stride(1) == 1
    strides = qkvz_TX.stride(0), ba_TX.stride(0), numbers_4S.stride(0)
    recur = Launch(
        _delta_net,
        (num_sequences, shape.num_value_heads),
        (qkvz_TX, ba_TX, *weights[1:], *cache.tensors, numbers_4S, out_TX, *strides, eps),
        {
            "KEY_HEADS": shape.num_key_heads,
            "HEADS": shape.num_value_heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "KEYS": power_of_two(shape.key_dim),
            "VALUES": power_of_two(shape.value_dim),
            "W": shape.conv_width,
            "LAG": MAX_LAG,
            "KEPT": NUM_INPUTS,
        },
    )
    num_kept = shape.num_channels + 2 * shape.num_value_heads
    keep = Launch(
        _keep_inputs,
        (num_sequences, min(max_count, NUM_INPUTS), triton.cdiv(num_kept, _CHANNELS)),
        (qkvz_TX, ba_TX, cache.inputs_LPC, numbers_4S, *strides),
        {"C": shape.num_channels, "HEADS": shape.num_value_heads, "CHANNELS": _CHANNELS, "KEPT": NUM_INPUTS},
    )
    return [recur, keep]
