"""Feed-forward of a layer with experts: a router chooses some of them for each token."""

import torch

from pipeline.kernels.contract import Kernels
from pipeline.kernels.layer_parts import Norm
from pipeline.kernels.routing import Routing
from pipeline.model.load import RoutedWeights


class RoutedExperts:
    """Router and experts of one layer, without the shared expert. norm_eps: of `weights.norms`."""

    def __init__(
        self, weights: RoutedWeights, routing: Routing, activation: str, norm_eps: float, kernels: Kernels
    ) -> None:
        bias_E, scale_E = weights.choice_bias_E, weights.scale_E
        self.kernels, self.routing, self.norms, self.norm_eps = kernels, routing, weights.norms, norm_eps
        self.router = kernels.prepare_linear(weights.router)
        self.choice_bias_E = None if bias_E is None else bias_E.float()
        self.scale_E = None if scale_E is None else scale_E.float()
        self.shared_gate = None if weights.shared_gate is None else kernels.prepare_linear(weights.shared_gate)
        self.experts = kernels.prepare_experts(weights.experts, activation, kernels.prepare_linear)

    def __call__(self, x_TH: torch.Tensor, residual_TH: torch.Tensor, shared_TH: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the experts' outputs and of the shared expert's, which may be overwritten. x_TH: the norm
        of `residual_TH` that the shared expert read."""
        router_TH = x_TH
        if self.norms is not None:
            router_TH, x_TH = (self._norm(residual_TH.clone(), norm) for norm in self.norms[:2])
        expert_TA, weight_TA = self.kernels.route(self.router(router_TH), self.routing, self.choice_bias_E)
        if self.scale_E is not None:
            weight_TA = weight_TA * self.scale_E[expert_TA]
        y_TH = self.experts(x_TH, expert_TA, weight_TA)
        if self.norms is not None:
            y_TH = self._norm(y_TH, self.norms.expert_post)
        if shared_TH is None:
            return y_TH
        if self.shared_gate is not None:
            shared_TH *= self.shared_gate(x_TH).sigmoid()
        if self.norms is not None:
            shared_TH = self._norm(shared_TH, self.norms.shared_post)
        return y_TH.add_(shared_TH)

    def _norm(self, x_TH: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm, written into x."""
        return self.kernels.rms_norm(x_TH, norm.weight_H, self.norm_eps)
