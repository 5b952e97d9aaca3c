"""Feed-forward of a layer with experts: a router chooses some of them for each token."""

import torch

from pipeline.kernels.contract import Kernels
from pipeline.kernels.routing import Routing
from pipeline.model.load import RoutedWeights


class RoutedExperts:
    """Router and experts of one layer, without the shared expert."""

    def __init__(self, weights: RoutedWeights, routing: Routing, activation: str, kernels: Kernels) -> None:
        bias_E = weights.choice_bias_E
        self.kernels, self.routing = kernels, routing
        self.router = kernels.prepare_linear(weights.router)
        self.choice_bias_E = None if bias_E is None else bias_E.float()
        self.shared_gate = None if weights.shared_gate is None else kernels.prepare_linear(weights.shared_gate)
        self.experts = kernels.prepare_experts(weights.experts, activation, kernels.prepare_linear)

    def __call__(self, x_TH: torch.Tensor, shared_TH: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the experts' outputs and of the shared expert's, which may be overwritten."""
        expert_TA, weight_TA = self.kernels.route(self.router(x_TH), self.routing, self.choice_bias_E)
        y_TH = self.experts(x_TH, expert_TA, weight_TA)
        if shared_TH is None:
            return y_TH
        if self.shared_gate is not None:
            shared_TH *= self.shared_gate(x_TH).sigmoid()
        return y_TH.add_(shared_TH)
