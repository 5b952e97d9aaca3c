"""GPTQ: integers for a linear that preserve its outputs on calibration inputs.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323,
algorithm 1: inputs are quantized one after another, and the error of each is spread over the remaining ones, weighted
by the inverse of the inputs' second moments.

Shape suffixes: N outputs, K inputs, g inputs of a group, T tokens.
"""

import torch

from pipeline.errors import ModelError
from pipeline.quantize.grid import IntLinear, group_scales, to_grid

DAMPING = 0.01  # added to each second moment, relative to their mean; increased tenfold until it suffices
MAX_DAMPING = 1.0


class SecondMoments:
    """Sum over tokens of x x^T (K, K) of a linear's inputs x, in float32."""

    def __init__(self) -> None:
        self.sum_KK: torch.Tensor | None = None

    def add(self, x_TK: torch.Tensor) -> None:
        x_TK = x_TK.float()
        new_KK = x_TK.T @ x_TK
        self.sum_KK = new_KK if self.sum_KK is None else self.sum_KK.add_(new_KK)


def gptq(
    weight_NK: torch.Tensor,
    moments_KK: torch.Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    act_order: bool = False,
) -> IntLinear:
    """Return integers in groups of `group_size` inputs, with scales in `dtype`.

    act_order: quantize inputs in descending order of their second moments, so that the most important ones are rounded
    before errors accumulate; groups follow that order. Raises ModelError for inputs that are not finite.
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
    position_K = torch.empty_like(order_K)
    position_K[order_K] = torch.arange(k, device=order_K.device)
    return IntLinear(q_NK[:, position_K], torch.cat(scales, dim=1), (position_K // group_size).int(), bits)


def _spread(moments_KK: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments.

    An input that is always 0 is independent of the others: its weights are rounded to the nearest.
    """
    diagonal_K = moments_KK.diagonal()
    if not bool(moments_KK.isfinite().all()):
        raise ModelError("calibration: inputs of a linear are NaN or infinite; does the model work in 16 bits?")
    mean = float(diagonal_K.mean()) or 1.0
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped_KK = moments_KK + torch.diag(torch.full_like(diagonal_K, damping * mean))
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if int(failed) == 0:
            upper_KK, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_KK), upper=True)
            if int(failed) == 0:
                return upper_KK
        damping *= 10
    raise ModelError("calibration: the inputs of a linear are too similar for GPTQ; use more and longer texts")
