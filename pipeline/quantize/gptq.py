"""GPTQ: integers for a linear such that its outputs on calibration inputs stay what they were.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323,
algorithm 1: inputs are quantized one after another, and the error of each is spread over those still to come, as the
inverse of the inputs' second moments says.

Shape suffixes: N outputs, K inputs, g inputs of a group, T tokens.
"""

import torch

from pipeline.errors import ModelError
from pipeline.quantize.grid import IntLinear, group_scales, to_grid

DAMPING = 0.01  # of the mean second moment, added to each; ten times as much, and again, where that is not enough
MOST_DAMPING = 1.0


class SecondMoments:
    """The sum over tokens of x x^T (K, K) of a linear's inputs x, in float32."""

    def __init__(self) -> None:
        self.sum_KK: torch.Tensor | None = None

    def add(self, x_TK: torch.Tensor) -> None:
        x_TK = x_TK.float()
        own_KK = x_TK.T @ x_TK
        self.sum_KK = own_KK if self.sum_KK is None else self.sum_KK.add_(own_KK)


def gptq(
    weight_NK: torch.Tensor,
    moments_KK: torch.Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    act_order: bool = False,
) -> IntLinear:
    """Integers in groups of `group_size` inputs, scales in `dtype`.

    act_order: inputs with the largest second moment first, so that those that matter most are rounded before errors
    have come together; groups are then of inputs in that order. Raises ModelError for inputs that are not finite.
    """
    weight_NK = weight_NK.float().clone()
    n, k = weight_NK.shape
    order_K = torch.arange(k, device=weight_NK.device)
    if act_order:
        order_K = torch.argsort(moments_KK.diagonal(), descending=True, stable=True)
        weight_NK, moments_KK = weight_NK[:, order_K], moments_KK[order_K][:, order_K]
    spread_KK = _spread(moments_KK)
    q_NK = torch.empty((n, k), dtype=torch.uint8, device=weight_NK.device)
    scales = []
    for start in range(0, k, group_size):
        stop = start + group_size
        block_Ng, errors_Ng = weight_NK[:, start:stop], torch.empty((n, group_size), device=weight_NK.device)
        spread_gg = spread_KK[start:stop, start:stop]
        scale_N1 = group_scales(block_Ng, bits, dtype)
        for j in range(group_size):
            column_N1 = block_Ng[:, j : j + 1]
            q_N1 = to_grid(column_N1, scale_N1, bits)
            value_N1 = (q_N1.float() - 2 ** (bits - 1)) * scale_N1.float()
            error_N1 = (column_N1 - value_N1) / spread_gg[j, j]
            block_Ng[:, j + 1 :] -= error_N1 * spread_gg[j, j + 1 :]
            q_NK[:, start + j], errors_Ng[:, j] = q_N1[:, 0], error_N1[:, 0]
        weight_NK[:, stop:] -= errors_Ng @ spread_KK[start:stop, stop:]
        scales.append(scale_N1)
    place_K = torch.empty_like(order_K)
    place_K[order_K] = torch.arange(k, device=order_K.device)
    return IntLinear(q_NK[:, place_K], torch.cat(scales, dim=1), (place_K // group_size).int(), bits)


def _spread(moments_KK: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped moments.

    An input that was never anything but 0 is alone: its weights are rounded to the nearest.
    """
    diagonal_K = moments_KK.diagonal()
    if not bool(moments_KK.isfinite().all()):
        raise ModelError("calibration: inputs of a linear are no finite numbers; does the model work in 16 bit?")
    mean = float(diagonal_K.mean()) or 1.0
    damping = DAMPING
    while damping <= MOST_DAMPING:
        damped_KK = moments_KK + torch.diag(torch.full_like(diagonal_K, damping * mean))
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if int(failed) == 0:
            upper_KK, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_KK), upper=True)
            if int(failed) == 0:
                return upper_KK
        damping *= 10
    raise ModelError(
        "calibration: the inputs of a linear are too alike to quantize by them; give more and longer texts"
    )
