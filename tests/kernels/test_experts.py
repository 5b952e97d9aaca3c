"""Choice of experts, and their outputs, by the definitions in `kernels.routing` and `kernels.contract`."""

import pytest
import torch

from pipeline.kernels.experts import LoopedExperts, route
from pipeline.kernels.reference import gate_mul
from pipeline.kernels.routing import Routing
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, ExpertWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("routing", "bias", "experts", "weights"),
    [
        (Routing(2), None, {0, 3}, [0.5, 0.5]),
        (Routing(2, renormalize=False), None, {0, 3}, [1 / 3, 1 / 3]),
        (Routing(1, "sigmoid", renormalize=False, scale=2.0), [0.0, 0.0, 0.9, 0.0], {2}, [1.0]),
        (Routing(2, "sigmoid", num_groups=2, top_groups=1), [0.0, 0.8, 0.0, 0.0], {0, 1}, [0.6, 0.4]),
    ],
)
def test_route(routing: Routing, bias: list[float] | None, experts: set[int], weights: list[float]) -> None:
    """Probabilities are 1/3, 1/6, 1/6, 1/3; their sigmoids 3/4, 1/2, 1/2, 3/4 with other logits."""
    odds = [3.0, 1.0, 1.0, 3.0] if routing.scoring == "sigmoid" else [2.0, 1.0, 1.0, 2.0]
    logits_TE = torch.tensor([odds]).log()
    found_TA, weight_TA = route(logits_TE, routing, None if bias is None else torch.tensor(bias))
    assert set(found_TA[0].tolist()) == experts
    order = found_TA[0].argsort()
    assert weight_TA[0, order].tolist() == pytest.approx(weights)


@pytest.mark.parametrize("kind", ["reference", "cpu"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (7, 5, 2), (3, 9, 4)])
def test_each_token_gets_the_weighted_sum_of_its_experts(
    kind: str, activation: str, num_tokens: int, num_experts: int, top_k: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16().float()  # exact in bfloat16, so that it is compiled

    gate_up = [DenseWeight(normal(32, 8), normal(32)) for _ in range(num_experts)]
    down = [DenseWeight(normal(8, 16), normal(8)) for _ in range(num_experts)]
    kernels = select_kernels(CPU, torch.float32, kind)
    experts = kernels.prepare_experts(ExpertWeights(tuple(gate_up), tuple(down)), activation, kernels.prepare_linear)
    assert isinstance(experts, LoopedExperts) == (kind == "reference")
    x_TH = 3 * normal(num_tokens, 8)
    expert_TA, weight_TA = route(normal(num_tokens, num_experts), Routing(top_k))
    found_TH = experts(x_TH, expert_TA, weight_TA)
    for x_H, expert_A, weight_A, y_H in zip(x_TH, expert_TA, weight_TA, found_TH):
        expected_H = torch.zeros(8)
        for expert, weight in zip(expert_A.tolist(), weight_A):
            inner_F = gate_mul(gate_up[expert].weight_NK @ x_H + gate_up[expert].bias_N, activation)
            expected_H += weight * (down[expert].weight_NK @ inner_F + down[expert].bias_N)
        torch.testing.assert_close(y_H, expected_H, rtol=1e-4, atol=1e-4)
