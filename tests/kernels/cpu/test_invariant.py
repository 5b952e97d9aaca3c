"""Batch-invariant kernels on CPU: within rounding of the oracle, and a row's bits do not depend on its batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cpu.attention import attention as batched
from pipeline.kernels.cpu.invariant import attention, prepare_linear
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, GroupIntWeight, LinearWeight
from tests.kernels.cpu.test_attention import TOLERANCE, ragged_step
from tests.kernels.steps import SOFTMAX_KINDS, softmax_options

CPU = torch.device("cpu")
TOKENS = 1, 2, 3, 6, 65, 257


def weights() -> dict[str, LinearWeight]:
    torch.manual_seed(0)
    return {
        "float32": DenseWeight(torch.randn(130, 320) * 320**-0.5, torch.randn(130)),
        "odd inputs": DenseWeight(torch.randn(70, 77) * 77**-0.5),
        "bfloat16": DenseWeight((torch.randn(130, 320) * 320**-0.5).to(torch.bfloat16)),
        "int4, reordered": GroupIntWeight(
            torch.randint(0, 16, (130, 320), dtype=torch.uint8),
            torch.rand(130, 5) / 100,
            torch.full((130, 5), 8.0),
            64,
            input_order_K=torch.randperm(320),
        ),
    }


def differing(linear: Callable[[torch.Tensor], torch.Tensor], num_inputs: int) -> list[int]:
    """Return the numbers in TOKENS at which that many rows alone differ from the same rows among 300."""
    x_MK = torch.randn(300, num_inputs)
    whole_MN = linear(x_MK)
    return [count for count in TOKENS if not torch.equal(linear(x_MK[-count:]), whole_MN[-count:])]


@pytest.mark.parametrize("name", weights())
def test_a_row_of_a_linear_is_independent(name: str) -> None:
    weight = weights()[name]
    linear = prepare_linear(weight)
    assert differing(linear, weight.in_features) == []
    x_MK = torch.randn(5, weight.in_features)
    oracle = x_MK.double() @ weight.dequantize(torch.float64).T + (0 if weight.bias_N is None else weight.bias_N)
    assert float((linear(x_MK) - oracle).abs().max() / oracle.abs().max()) < 2e-6


def test_a_row_of_a_float32_weight_is_not_with_blas() -> None:
    weight = weights()["float32"]
    assert differing(select_kernels(CPU, torch.float32).prepare_linear(weight), weight.in_features)


def of_each_query(
    attend: Callable[..., torch.Tensor],
    q_TND: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    attn_metadata: AttentionInput,
) -> torch.Tensor:
    rows = [attn_metadata.rows(np.array([row])) for row in range(len(q_TND))]
    return torch.cat([attend(q_TND[r : r + 1], *caches, own, 0.3, None) for r, own in enumerate(rows)])


@pytest.mark.parametrize("seed", range(3))
def test_a_query_is_independent(seed: int) -> None:
    torch.manual_seed(seed)
    attn_metadata, *caches = ragged_step(np.random.default_rng(seed), 2, 40, 16, torch.float32)
    q_TND = torch.randn(int(attn_metadata.query_start_S1[-1]), 4, 40)
    for window, kind in ((None, ""), (13, ""), (13, SOFTMAX_KINDS[seed])):
        options = 0.3, window, *softmax_options(kind, 4)
        oracle = reference_attention(q_TND, *caches, attn_metadata, *options)
        ours = attention(q_TND, *caches, attn_metadata, *options)
        assert float((ours - oracle).abs().max()) < TOLERANCE[torch.float32]
    together = attention(q_TND, *caches, attn_metadata, 0.3, None)
    assert torch.equal(of_each_query(attention, q_TND, (*caches,), attn_metadata), together)
    others = batched.attention(q_TND, *caches, attn_metadata, 0.3, None)
    assert not torch.equal(of_each_query(batched.attention, q_TND, (*caches,), attn_metadata), others)
