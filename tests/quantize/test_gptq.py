"""GPTQ on one linear: outputs nearer than by rounding, the same as a plain writing of the algorithm, whole groups."""

import numpy as np
import pytest
import torch

from pipeline.errors import ModelError
from pipeline.quantize.gptq import DAMPING, SecondMoments, gptq
from pipeline.quantize.grid import round_to_nearest

N, K, GROUP = 48, 128, 32


def correlated_inputs(seed: int) -> torch.Tensor:
    """(T, K): few directions, some inputs large, as behind an attention."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(600, 24, generator=rng) @ torch.randn(24, K, generator=rng)
    return (mixed + 0.1 * torch.randn(600, K, generator=rng)) * torch.logspace(-1, 0.7, K)[
        torch.randperm(K, generator=rng)
    ]


@pytest.fixture
def linear() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, inputs, and the inputs' second moments."""
    torch.manual_seed(1)
    x_TK, moments = correlated_inputs(2), SecondMoments()
    for part in x_TK.split(170):
        moments.add(part)
    assert moments.sum_KK is not None
    return torch.randn(N, K) * 0.3, x_TK, moments.sum_KK


def loss(weight: torch.Tensor, other: torch.Tensor, x_TK: torch.Tensor) -> float:
    return float(((x_TK @ weight.T - x_TK @ other.T) ** 2).mean())


def test_outputs_stay_nearer_than_by_rounding_on_inputs_seen_and_not_seen(linear):
    weight, x_TK, moments = linear
    made = gptq(weight, moments, 4, GROUP, torch.float16).dequantize()
    nearest = round_to_nearest(weight, 4, GROUP, torch.float16).dequantize()
    assert loss(weight, made, x_TK) < 0.3 * loss(weight, nearest, x_TK)
    unseen = correlated_inputs(2)[torch.randperm(600)[:300]] * 1.3
    assert loss(weight, made, unseen) < 0.3 * loss(weight, nearest, unseen)


def plainly(weight: np.ndarray, moments: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Algorithm 1 of arXiv 2210.17323 without blocks, in float64, from the inverse itself, one column after another in
    the order of the moments, on grids of the weights before."""
    weight, top = weight.astype(np.float64).copy(), 2**bits - 1
    inverse = np.linalg.inv(moments + DAMPING * moments.diagonal().mean() * np.eye(len(moments)))
    parts = weight.reshape(len(weight), -1, group)
    low, high = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
    scales = ((high - low) / top).astype(np.float16).astype(np.float64)
    zeros, out = np.round(-low / scales), np.empty_like(weight)
    for k in np.argsort(-moments.diagonal(), kind="stable"):
        scale, zero = scales[:, k // group], zeros[:, k // group]
        out[:, k] = (np.clip(np.round(weight[:, k] / scale) + zero, 0, top) - zero) * scale
        error = (weight[:, k] - out[:, k]) / inverse[k, k]
        weight -= error[:, None] * inverse[k]
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_algorithm_of_the_paper(linear, bits):
    weight, _, moments = linear
    made = gptq(weight, moments, bits, GROUP, torch.float16).dequantize().numpy()
    expected = plainly(weight.numpy(), moments.double().numpy(), bits, GROUP)
    off = np.abs(made - expected) > 1e-6
    assert off.mean() < 0.02, "a rounding that falls the other way may move what comes after it, and no more"


def test_inputs_that_are_never_there_are_rounded_to_the_nearest(linear):
    weight, _, moments = linear
    moments = moments.clone()
    moments[:GROUP], moments[:, :GROUP] = 0, 0
    made = gptq(weight, moments, 4, GROUP, torch.float16)
    assert torch.equal(made.q_NK[:, :GROUP], round_to_nearest(weight, 4, GROUP, torch.float16).q_NK[:, :GROUP])
    assert torch.equal(gptq(weight, torch.zeros(K, K), 4, GROUP, torch.float16).q_NK,
                       round_to_nearest(weight, 4, GROUP, torch.float16).q_NK)  # fmt: skip


def test_fewer_tokens_than_inputs_are_enough_and_no_numbers_are_refused(linear):
    weight, x_TK, _ = linear
    few = x_TK[:3]
    made = gptq(weight, few.T @ few, 4, GROUP, torch.float16).dequantize()
    assert loss(weight, made, few) < loss(weight, round_to_nearest(weight, 4, GROUP, torch.float16).dequantize(), few)
    alike = torch.eye(K)
    alike[0, 1] = alike[1, 0] = 1.05  # by rounding: no inputs have such moments
    gptq(weight, alike, 4, GROUP, torch.float16)
    alike[0, 1] = alike[1, 0] = 5.0
    with pytest.raises(ModelError, match="too similar"):
        gptq(weight, alike, 4, GROUP, torch.float16)
    with pytest.raises(ModelError, match="NaN or infinite"):
        gptq(weight, torch.full((K, K), torch.nan), 4, GROUP, torch.float16)


def test_rounding_is_to_the_nearest_of_a_range_that_includes_0():
    weight = torch.tensor([[12, -3, 0.4, 0.6, 0, 0, 0, 0], [0] * 8, [15, 15, 15, 15, 15, 15, 15, 7]])
    made = round_to_nearest(weight, 4, 8, torch.float32)
    assert made.scales_NG[::2].tolist() == [[1.0], [1.0]]
    assert made.zeros_NG.tolist() == [[3], [0], [0]]
    assert made.q_NK.tolist() == [[15, 0, 3, 4, 3, 3, 3, 3], [0] * 8, [15, 15, 15, 15, 15, 15, 15, 7]]
    weight[0, :2] = torch.tensor([7.5, -7.5])
    made = round_to_nearest(weight, 4, 8, torch.float32, symmetric=True)
    assert made.scales_NG[:2, 0].tolist() == [1.0, made.scales_NG[1].item()]
    assert made.q_NK[:2].tolist() == [[15, 0, 8, 9, 8, 8, 8, 8], [8] * 8]
    assert bool((made.scales_NG > 0).all())
    weight = torch.randn(5, 64)
    for bits, group in ((4, 32), (8, 64)):
        for symmetric in (False, True):
            made = round_to_nearest(weight, bits, group, torch.float32, symmetric)
            step = made.scales_NG.repeat_interleave(group, 1)
            assert bool(((made.dequantize() - weight).abs() <= step / 2 * 1.0001).all())
