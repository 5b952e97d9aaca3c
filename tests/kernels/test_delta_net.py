"""Gated DeltaNet: all sets of kernels, over steps that are undone, rejected and repeated, against the plain formula."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels import delta_net as reference
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cpu import delta_net as compiled
from pipeline.kernels.delta_net import UNIT_EPS, DeltaWeights, StateCache
from pipeline.kernels.delta_shape import MAX_LAG, DeltaNet
from pipeline.kernels.triton import delta_net as fused
from tests.kernels.triton.problems import DEVICE

CPU, EPS = torch.device("cpu"), 1e-5
SHAPES = [DeltaNet(1, 1, 8, 8, 4), DeltaNet(2, 4, 12, 20, 4), DeltaNet(1, 3, 16, 40, 2)]


class Served(NamedTuple):
    kernels: Any
    device: torch.device
    dtype: torch.dtype


SETS = [
    *(Served(kernels, CPU, dtype) for kernels in (reference, compiled) for dtype in (torch.float32, torch.bfloat16)),
    Served(fused, DEVICE, torch.float32),
]


def formula(qkvz_TX: torch.Tensor, ba_TX: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """Return the outputs (T, V, D) of a whole sequence in float64, head by head."""
    shape, (qkvz_TX, ba_TX) = weights.shape, (qkvz_TX.double(), ba_TX.double())
    conv_WC, decay_V, dt_V, norm_D = (weight.double() for weight in weights[1:])
    padded = F.pad(qkvz_TX[:, : shape.num_channels], (0, 0, shape.conv_width - 1, 0))
    mixed = F.silu(sum(conv_WC[w] * padded[w : w + len(qkvz_TX)] for w in range(shape.conv_width)))
    z_TVD = qkvz_TX[:, shape.num_channels :].view(-1, shape.num_value_heads, shape.value_dim)
    out_TVD, keys = torch.empty_like(z_TVD), shape.num_key_heads * shape.key_dim
    for head in range(shape.num_value_heads):
        first = head // (shape.num_value_heads // shape.num_key_heads) * shape.key_dim
        value = 2 * keys + head * shape.value_dim
        state_KD = torch.zeros(shape.key_dim, shape.value_dim, dtype=torch.float64)
        for t, token in enumerate(mixed):
            q, k = (token[at : at + shape.key_dim] for at in (first, keys + first))
            q, k = (x / (x.square().sum() + UNIT_EPS).sqrt() for x in (q, k))
            b, a = ba_TX[t, head], ba_TX[t, shape.num_value_heads + head]
            state_KD *= (decay_V[head] * F.softplus(a + dt_V[head])).exp()
            state_KD += k[:, None] * (b.sigmoid() * (token[value : value + shape.value_dim] - k @ state_KD))
            out = q @ state_KD / shape.key_dim**0.5
            out_TVD[t, head] = out / (out.square().mean() + EPS).sqrt() * norm_D * F.silu(z_TVD[t, head])
    return out_TVD


class Step(NamedTuple):
    """Tokens of rows that are computed together. can_repeat: the step may run twice."""

    rows: np.ndarray
    tokens: list[np.ndarray]
    attn_metadata: AttentionInput
    can_repeat: bool

    def inputs(self, of_rows_RTX: torch.Tensor) -> torch.Tensor:
        return torch.cat([of_rows_RTX[row, at] for row, at in zip(self.rows.tolist(), self.tokens)])


def drawn_steps(rng: np.random.Generator, num_rows: int, length: int, num_slots: int) -> Iterator[Step]:
    """Draw steps that compute all tokens of rows in random slots. Up to 8 tokens of a step may be rejected afterwards,
    and a step may run twice; longer runs are kept."""
    slot_R, done_R = rng.permutation(num_slots)[:num_rows], np.zeros(num_rows, dtype=np.int64)
    while (done_R < length).any():
        rows = rng.permutation(np.flatnonzero(done_R < length))
        most = np.minimum(length - done_R[rows], rng.choice([1, MAX_LAG, 2 * MAX_LAG]))
        count_S = rng.integers(1, most + 1)
        tokens = [np.arange(done_R[row], done_R[row] + count) for row, count in zip(rows, count_S)]
        step = AttentionInput(
            query_start_S1=np.append(0, np.cumsum(count_S)).astype(np.int32),
            context_len_S=(done_R[rows] + count_S).astype(np.int32),
            block_table_SM=np.zeros((len(rows), 1), dtype=np.int32),
            slot_mapping_T=torch.zeros(int(count_S.sum()), dtype=torch.int64),
            block_size=1,
            state_slot_S=slot_R[rows],
        )
        yield Step(rows, tokens, step, bool((count_S <= MAX_LAG).all()) and rng.random() < 0.5)
        done_R[rows] += np.where(count_S <= MAX_LAG, rng.integers(0, count_S + 1), count_S)


def drawn(shape: DeltaNet, dtype: torch.dtype, num_rows: int, length: int) -> tuple[DeltaWeights, list[torch.Tensor]]:
    """Draw weights, and the inputs qkvz and ba of rows."""
    torch.manual_seed(0)
    heads, width = shape.num_value_heads, shape.num_channels + shape.num_outputs
    weights = DeltaWeights(
        shape,
        conv_WC=torch.randn(shape.conv_width, shape.num_channels),
        decay_V=-torch.rand(heads),
        dt_bias_V=torch.randn(heads),
        norm_D=torch.rand(shape.value_dim) + 0.5,
    )
    return weights, [torch.randn(num_rows, length, size).to(dtype) for size in (width, 2 * heads)]


ON_SETS = pytest.mark.parametrize("on", SETS, ids=lambda on: f"{on.kernels.__name__.split('.')[-2]}-{on.dtype}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ON_SETS
def test_outputs_are_those_of_the_formula_however_steps_cut_and_repeat_tokens(on: Served, shape: DeltaNet) -> None:
    num_rows, length = 3, 40
    weights, inputs = drawn(shape, on.dtype, num_rows, length)
    expected = [formula(*row, weights).flatten(1) for row in zip(*inputs)]
    cache, num_steps = StateCache.allocate(5, shape, on.dtype, on.device), 0
    for tensor in cache.tensors:
        tensor.fill_(7)  # of a former sequence
    cache.state_LVKD.fill_(float("nan"))
    for step in drawn_steps(np.random.default_rng(shape.key_dim), num_rows, length, 5):
        of_step = [step.inputs(each).to(on.device) for each in inputs]
        for _ in range(1 + step.can_repeat):
            ours = on.kernels.delta_net(*of_step, weights.to(on.device), EPS, cache, step.attn_metadata)
        theirs = torch.cat([expected[row][at] for row, at in zip(step.rows.tolist(), step.tokens)])
        tolerance = 1e-4 if on.dtype == torch.float32 else 0.03
        assert torch.allclose(ours.cpu().double(), theirs, atol=tolerance, rtol=tolerance)
        num_steps += 1
    assert num_steps > 8


@ON_SETS
def test_states_in_bfloat16_are_rounded_once_in_a_step(on: Served) -> None:
    """Each step computes what it computes from the same states in float32, and keeps the results rounded."""
    shape = replace(SHAPES[1], state_dtype="bfloat16")
    weights, inputs = drawn(shape, on.dtype, 2, 30)
    cache, exact = (
        StateCache.allocate(5, each, on.dtype, on.device) for each in (shape, replace(shape, state_dtype="float32"))
    )
    num_changed, tolerance = 0, 1e-5 if on.dtype == torch.float32 else 0.01
    for step in drawn_steps(np.random.default_rng(shape.key_dim), 2, 30, 5):
        for ours, theirs in zip(cache.tensors, exact.tensors):
            theirs.copy_(ours)
        before = cache.state_LVKD.clone()
        of_step = *(step.inputs(each).to(on.device) for each in inputs), weights.to(on.device), EPS
        out_TX, exact_TX = (on.kernels.delta_net(*of_step, each, step.attn_metadata) for each in (cache, exact))
        assert torch.allclose(out_TX, exact_TX, atol=tolerance, rtol=tolerance)
        rounded = exact.state_LVKD.bfloat16()
        assert torch.allclose(cache.state_LVKD.float(), rounded.float(), atol=1e-30, rtol=2**-7)
        if on.kernels is not fused:  # Triton's interpreter cuts where a GPU rounds
            assert float((cache.state_LVKD == rounded).float().mean()) > 0.99
        num_changed += int((cache.state_LVKD != before).any())
    assert num_changed > 4
