"""Experts on CPU by compiled linears, which write into arrays. `kernels/experts.py` is the oracle.

The tokens of all experts are gathered once, and activation and sum are one kernel for all of them, so an expert takes
two calls. With few tokens an expert's linears take as long as the Python around them.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipeline.kernels.contract import Experts
from pipeline.kernels.cpu.compile.numerics import as_in, bits, wide
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, kernel, parallel_for, use_threads
from pipeline.kernels.cpu.elementwise import GATES, gate_mul, gate_mul_kernel
from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.experts import LoopedExperts
from pipeline.kernels.linears import Linear
from pipeline.weights.packed import ExpertWeights, LinearWeight


@kernel()
def combine_kernel(y_PH, pair_TA, weight_TA, out_TH, begin, end):
    """Sum the rows of each token's pairs, times their weights, in float32."""
    num_tokens, width = out_TH.shape
    if end < 0:
        return parallel_for(num_tokens)
    sum_H = np.empty(width, np.float32)
    for t in range(begin, end):
        out = out_TH[t]
        sum_H[:] = np.float32(0.0)
        for a in range(pair_TA.shape[1]):
            y, weight = y_PH[pair_TA[t, a]], weight_TA[t, a]
            for i in range(width):
                sum_H[i] += wide(y[i]) * weight
        for i in range(width):
            out[i] = as_in(out, sum_H[i])


class TiledExperts:
    """Experts whose linears are all compiled."""

    def __init__(self, gate_up: Sequence[TiledLinear], down: Sequence[TiledLinear], activation: str) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, GATES.index(activation)

    def __call__(self, x_TH: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        """Implement `contract.Experts`."""
        num_tokens, num_chosen = expert_TA.shape
        expert_P, out_TH, x = expert_TA.numpy().ravel(), torch.empty_like(x_TH), bits(x_TH)
        order_P = expert_P.argsort(kind="stable")
        pair_TA = np.empty(expert_P.shape, np.int64)
        pair_TA[order_P] = np.arange(len(order_P))
        ends = np.bincount(expert_P, minlength=len(self._gate_up)).cumsum().tolist()
        runs = [(e, start, stop) for e, (start, stop) in enumerate(zip([0, *ends], ends)) if start < stop]
        x_PH = x[order_P // num_chosen]
        (two_width, _), (hidden, width) = self._gate_up[0].shape_NK, self._down[0].shape_NK
        gate_up_P2F, product_PF, y_PH = (np.empty((len(x_PH), n), x.dtype) for n in (two_width, width, hidden))
        use_threads(bool(runs) and self._gate_up[0].is_parallel(len(x_PH) // len(runs)))
        for expert, start, stop in runs:
            self._gate_up[expert].write(x_PH[start:stop], gate_up_P2F[start:stop])
        gate_mul_kernel(gate_up_P2F, self._gate, product_PF, *ALL_ITEMS)
        for expert, start, stop in runs:
            self._down[expert].write(product_PF[start:stop], y_PH[start:stop])
        combine_kernel(y_PH, pair_TA.reshape(num_tokens, num_chosen), weight_TA.numpy(), bits(out_TH), *ALL_ITEMS)
        return out_TH


def prepare_experts(
    weights: ExpertWeights, activation: str, prepare_linear: Callable[[LinearWeight], Linear]
) -> Experts:
    """Implement `Kernels.prepare_experts`."""
    looped = LoopedExperts(weights, activation, prepare_linear, gate_mul)
    gate_up, down = ([each for each in ls if isinstance(each, TiledLinear)] for ls in (looped.gate_up, looped.down))
    is_tiled = len(gate_up) == len(looped.gate_up) and len(down) == len(looped.down)
    return TiledExperts(gate_up, down, activation) if is_tiled else looped
